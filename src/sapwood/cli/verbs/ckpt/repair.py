"""``sapwood ckpt repair``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.fragments import FragmentFolders
from sapwood.cli.verbs.ckpt.mend import is_sound, mend
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, Place, find_tiers
from sapwood.cli.verbs.ckpt.published import damaged_headers, problem_of, rewrite_header
from sapwood.cli.verbs.ckpt.survey import Checkpoint, Leftover, survey
from sapwood.cli.words import age
from sapwood.errors import SapwoodError
from sapwood.runtime.durations import parse_seconds, show_seconds
from sapwood.tiers.files import Files

__all__ = ["repair"]

_Flag = Annotated[bool, Parameter(negative="")]


@dataclass(frozen=True)
class _Step:
    """One thing to do."""

    sentence: str
    do: Callable[[], object]


def repair(
    place: str = DEFAULT_PLACE,
    /,
    *,
    source: Annotated[tuple[str, ...], Parameter(name="--from")] = (),
    older: str = "1h",
    incomplete: _Flag = False,
    yes: _Flag = False,
) -> int:
    """Mend a place: finish what can be finished, copy lost shards back, clear leftovers away.

    Checkpoints whose shards are all there but that were never published are published. With
    `--from`, shards that are missing or damaged are copied from another place, verified, and read
    back; this reads every byte of both. Fragments that nodes of a parity group have lost, or that
    are damaged, are made anew from the others, if the folders of the nodes are all below the place.
    Drafts of dead attempts and what is left of removed checkpoints goes once nothing in it has
    changed for an hour. Without `--yes` it only says what it would do. The exit code is 1 if
    something could not be done.

    ```
    sapwood ckpt repair                              say what would be done to ckpts/
    sapwood ckpt repair /data/ckpts --yes            do it
    sapwood ckpt repair ckpts --from /scratch --yes  copy lost shards from the nodes' folders
    sapwood ckpt repair --older 1d --incomplete      also name old ones that can never be whole
    ```

    Args:
        place: A folder or s3:// URL.
        source: Other places that may have what is lost here; may be given several times.
        older: How long a leftover must have been untouched: 90s, 15m, 1h, 2d.
        incomplete: Also remove checkpoints with shards missing, if a newer one is whole. Give the
            folder of all nodes, not of one: shards on other nodes count.
        yes: Do it.
    """
    limit = parse_seconds(older, "--older")
    here, there = find_tiers(place), [one for text in source for one in find_tiers(text)]
    steps = list(_plan(here, there, limit, incomplete=incomplete))
    failed = 0
    for step in steps:
        print(f"{'' if yes else 'would '}{step.sentence}")
        if yes:
            failed += not _done(step)
    if not steps:
        print(f"nothing to do in {place}")
    elif not yes:
        print("nothing was changed; add --yes to do it")
    return int(failed > 0)


def _done(step: _Step) -> bool:
    try:
        step.do()
    except (SapwoodError, OSError) as error:
        print(f"  failed: {error}")
        return False
    return True


def _plan(
    here: Sequence[Place], there: Sequence[Place], limit: float, *, incomplete: bool
) -> Iterator[_Step]:
    for place in here:
        sweep = getattr(place.tier, "sweep", None)
        if sweep is not None:  # a bucket's leftovers are uploads, which only the tier can see
            when = f"{show_seconds(limit)} ago or earlier"
            word = f"abort uploads to {place.label} that were begun {when}"
            yield _Step(word, partial(sweep, limit))
    ours = survey(here)
    theirs = {c.id: c for c in survey(there)} if there else {}
    newest = next((c for c in reversed(ours) if c.whole), None)
    wanted = dict.fromkeys(c.id for c in ours)
    best = max((c for c in theirs.values() if c.whole), key=lambda c: c.id, default=None)
    if best is not None and (newest is None or best.id.step > newest.id.step):
        wanted[best.id] = None
    known = {c.id: c for c in ours}
    for id in wanted:
        mine = known.get(id, Checkpoint(id))
        copies = list(_copies(mine, theirs[id], here, ours)) if id in theirs else []
        yield from copies
        finishing = [*_finishing(mine), *_remaking(mine)]
        yield from finishing
        if not finishing and not copies:
            yield from _clearing(mine, newest, limit, incomplete=incomplete)


def _copies(
    mine: Checkpoint, theirs: Checkpoint, here: Sequence[Place], ours: Sequence[Checkpoint]
) -> Iterator[_Step]:
    record = mine.any_record or theirs.any_record
    for rank in range(record.world if record is not None else 0):
        own = [c for c in mine.copies if c.rank == rank and c.fragments is None]
        bad = [c for c in own if not is_sound(c, mine.id)]
        if own and not bad:
            continue
        source = next((c for c in theirs.copies if c.rank == rank and is_sound(c, mine.id)), None)
        targets = [c.place for c in bad] or _homes_of(rank, here, ours)
        for target in targets if source is not None else ():
            assert source is not None
            word = "replace the damaged" if bad else "copy the missing"
            yield _Step(
                f"{word} shard {rank} of {mine.id} in {target.label} from {source.place.label}",
                partial(mend, source, target, mine.id),
            )


def _homes_of(rank: int, here: Sequence[Place], ours: Sequence[Checkpoint]) -> list[Place]:
    """Where a lost shard goes: where the rank's other shards are, or the only place there is."""
    copies = [c for one in ours for c in one.copies if c.rank == rank and c.fragments is None]
    homes = {c.place.label: c.place for c in copies}
    return list(homes.values())[-1:] or list(here[:1] if len(here) == 1 else ())


def _finishing(mine: Checkpoint) -> Iterator[_Step]:
    """Publish a draft that has everything, and the files other tools read; tiers know how."""
    record = mine.any_record
    if not mine.whole or record is None:
        return
    for place in mine.places:
        for path, layout in damaged_headers(place, mine.id, record.catalog):
            yield _Step(f"rewrite the header of {path}", partial(rewrite_header, path, layout))
        publish = getattr(place.tier, "publish", None)
        if publish is not None and problem_of(place, mine.id) is not None:
            yield _Step(f"publish {mine.id} in {place.label}", partial(publish, mine.id))
    for left in mine.drafts:
        finish = getattr(left.place.tier, "finish", None)
        if finish is not None:
            yield _Step(f"finish {mine.id} in {left.place.label}", partial(finish, mine.id))


def _remaking(mine: Checkpoint) -> Iterator[_Step]:
    """Write fragments anew, so that as many nodes as before may be lost."""
    for place in mine.places:
        tier = place.tier
        if isinstance(tier, FragmentFolders) and (wrong := problem_of(place, mine.id)):
            word = f"write anew in {place.label} what is lost of {mine.id} ({wrong})"
            yield _Step(word, partial(tier.remake, mine.id))


def _clearing(
    mine: Checkpoint, newest: Checkpoint | None, limit: float, *, incomplete: bool
) -> Iterator[_Step]:
    hopeless = mine.copies and not mine.whole and newest is not None and mine.id < newest.id
    if hopeless and incomplete and (mine.age or 0) >= limit:
        for place in mine.places:
            yield _Step(
                f"remove {mine.id} from {place.label} ({mine.state})",
                partial(place.tier.drop, mine.id),
            )
        return
    for left in mine.leftovers:
        if left.age >= limit and not _holds_shards(left, mine):
            yield _Step(f"remove {left.path} (untouched for {age(left.age)})", _removal(left))


def _holds_shards(left: Leftover, mine: Checkpoint) -> bool:
    """Whether shards that count are in there: those of a draft whose other ranks never came."""
    return left in mine.drafts and any(c.place.folder == left.place.folder for c in mine.copies)


def _removal(left: Leftover) -> Callable[[], None]:
    files = Files()

    def remove() -> None:
        if left.path.is_dir():
            files.remove_tree(left.path)
        else:
            files.remove(left.path)
        files.sync_folder(left.path.parent)

    return remove
