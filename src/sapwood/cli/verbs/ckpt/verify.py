"""``sapwood ckpt verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.content import gaps
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, find_places
from sapwood.cli.verbs.ckpt.published import problem_of
from sapwood.cli.verbs.ckpt.survey import Checkpoint, Copy, find_one, survey
from sapwood.cli.words import progress, size
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.tiers.base import Stored, open_checked, read_range
from sapwood.tiers.record import CheckpointId

__all__ = ["Damage", "check_copy", "verify"]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something of a checkpoint that is not as it was saved."""

    checkpoint: str
    shard: int | None
    where: str
    problem: str
    file: str | None = None
    tensor: str | None = None
    start: int | None = None
    """First byte of the tensor that is in doubt; a checksum covers up to 4 MiB."""
    stop: int | None = None


def verify(
    *checkpoints: str,
    place: str = DEFAULT_PLACE,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Read every byte of every copy and compare it with its checksum.

    Says exactly what is damaged: the copy, the tensor, and which of its bytes. Shards that lie
    where they do not belong (a folder that was renamed, files that were swapped) are damage too.
    The exit code is 1 if anything is damaged or missing.

    ```
    sapwood ckpt verify                       everything under ckpts/
    sapwood ckpt verify latest                the newest whole one
    sapwood ckpt verify 10 15 --place /data/ckpts
    sapwood ckpt verify s3://bucket/run7/latest --json
    ```

    Args:
        checkpoints: Steps, ids or latest; a place may stand before each. All if none is given.
        place: Where to look.
        json: Write JSON instead of text.
    """
    from sapwood.cli.output import print_json

    chosen = [find_one(name, place) for name in checkpoints] or survey(find_places([place]))
    damages = []
    records = [c.record for one in chosen for c in one.copies if c.record is not None]
    total = sum(part.nbytes for record in records for part in record.ranges)
    with progress("verifying", total) as advance:
        for one in chosen:
            damages += list(_check(one, advance))
    if json:
        names = [one.id.folder for one in chosen]
        print_json({"checked": names, "bytes": total, "damages": [asdict(d) for d in damages]})
    else:
        _show(chosen, damages, total)
    return int(bool(damages))


def check_copy(
    copy: Copy, id: CheckpointId, advance: Callable[[int], None] = lambda n: None
) -> Iterator[Damage]:
    """Read one copy of a shard to its end, whatever is wrong on the way."""
    facts: dict[str, Any] = {"checkpoint": id.folder, "shard": copy.rank, "where": copy.place.label}
    try:
        shard = open_checked(copy.place.tier, Stored(id, copy.rank))
    except SapwoodError as error:
        yield Damage(problem=str(error), **facts)
        return
    with closing(shard):
        buffer = memoryview(bytearray(shard.record.range_bytes))
        for part in shard.record.ranges:
            try:
                read_range(shard, part, buffer[: part.nbytes])
            except SapwoodError as error:
                start = part.piece.start + part.start
                yield Damage(
                    problem=str(error),
                    file=part.piece.file,
                    tensor=part.piece.name,
                    start=start,
                    stop=start + part.nbytes,
                    **facts,
                )
            advance(part.nbytes)


def _check(one: Checkpoint, advance: Callable[[int], None]) -> Iterator[Damage]:
    for copy in one.copies:
        yield from check_copy(copy, one.id, advance)
    where = ", ".join(place.label for place in one.places)
    facts: dict[str, Any] = {"checkpoint": one.id.folder, "where": where}
    if not one.copies:
        yield Damage(shard=None, problem="partial: it was never finished", **facts)
        return
    for rank in _unlike(one):
        word = "its copies are of different saves: files were moved, or two trainings wrote them"
        yield Damage(shard=rank, problem=word, **facts)
    for rank in sorted(set(one.missing) - {c.rank for c in one.copies}):
        yield Damage(shard=rank, problem="the shard is missing", **facts)
    if one.whole:
        try:
            problems: Sequence[str] = gaps(one)
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            yield Damage(shard=None, problem=problem, **facts)
    for place in {copy.place.label: copy.place for copy in one.copies}.values():
        wrong = problem_of(place, one.id)
        if wrong is not None:
            yield Damage(
                checkpoint=one.id.folder, shard=None, where=place.label, problem=f"files: {wrong}"
            )


def _unlike(one: Checkpoint) -> list[int]:
    """Shards whose copies are each sound, and not the same."""
    kinds: dict[int, set[object]] = {}
    for copy in one.copies:
        if (record := copy.record) is not None:
            mark = (record.identity, record.created, record.digests)
            kinds.setdefault(copy.rank, set()).add(mark)
    return sorted(rank for rank, found in kinds.items() if len(found) > 1)


def _show(chosen: Sequence[Checkpoint], damages: Sequence[Damage], total: int) -> None:
    for one in chosen:
        mine = [d for d in damages if d.checkpoint == one.id.folder]
        print(f"{one.id}: {'ok' if not mine else f'{len(mine)} problems'}")
        for damage in mine:
            shard = "" if damage.shard is None else f"shard {damage.shard} in "
            print(f"  {shard}{damage.where}: {damage.problem}")
    verdict = "all sound" if not damages else f"{len(damages)} problems"
    print(f"{len(chosen)} checkpoints, {size(total)} read: {verdict}")
