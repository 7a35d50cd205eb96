"""What can be done for the checkpoints of a place, and for which of them nothing can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sapwood.cli.verbs.ckpt.diagnosis import Diagnosis
from sapwood.cli.verbs.ckpt.fragments import FragmentFolders
from sapwood.cli.verbs.ckpt.mend import mend
from sapwood.cli.verbs.ckpt.places import Place
from sapwood.cli.verbs.ckpt.published import damaged_headers, problem_of, rewrite_header
from sapwood.cli.verbs.ckpt.survey import Checkpoint, Copy, Leftover
from sapwood.cli.words import age
from sapwood.runtime.durations import show_seconds
from sapwood.storage.files import Files
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.record import CheckpointId

__all__ = ["Remedies", "Step"]


@dataclass(frozen=True)
class Step:
    """One thing to do."""

    sentence: str
    do: Callable[[], object]


class Remedies:
    """Finds what to do; while ``steps`` goes on, it notes what cannot be helped."""

    def __init__(
        self,
        here: Sequence[Place],
        ours: Sequence[Diagnosis],
        theirs: Sequence[Diagnosis],
        limit: float,
        *,
        incomplete: bool,
    ) -> None:
        """``theirs`` are of other places that may have what is lost in ``here``.

        What has not changed for ``limit`` seconds is nobody's any more; ``incomplete``: also what
        is beyond repair goes, where a newer one is sound.
        """
        self._here = here
        self._ours = {one.checkpoint.id: one for one in ours}
        self._theirs = {one.checkpoint.id: one for one in theirs}
        self._limit = limit
        self._incomplete = incomplete
        self._newest = next((one.checkpoint for one in reversed(ours) if _is_sound(one)), None)
        self.hopeless: list[str] = []
        """Checkpoints that were whole and cannot be restored any more, one sentence each."""
        self.unfinished: list[str] = []
        """Checkpoints that never were whole, or may become so yet."""

    def steps(self) -> Iterator[Step]:
        """What to do, in this order."""
        for place in self._here:
            sweep = getattr(place.tier, "sweep", None)
            if sweep is not None:  # a bucket's leftovers are uploads, which only the tier can see
                when = f"{show_seconds(self._limit)} ago or earlier"
                word = f"abort uploads to {place.label} that were begun {when}"
                yield Step(word, partial(sweep, self._limit))
        for id in self._wanted():
            mine = self._ours.get(id, Diagnosis(Checkpoint(id), ()))
            yield from self._steps_for(mine)

    def _wanted(self) -> list[CheckpointId]:
        """All that are here, and the newest of the other places, if it is newer."""
        wanted = dict.fromkeys(self._ours)
        sound = [one.checkpoint.id for one in self._theirs.values() if _is_sound(one)]
        best = max(sound, default=None)
        if best is not None and (self._newest is None or best.step > self._newest.id.step):
            wanted[best] = None
        return list(wanted)

    def _steps_for(self, mine: Diagnosis) -> Iterator[Step]:
        checkpoint = mine.checkpoint
        copies = list(self._copies(mine))
        yield from copies
        lost = self._lost(mine)
        whole = not lost and mine.mixture is None
        finishing = [*_finishing(checkpoint), *_remaking(checkpoint)] if whole else []
        yield from finishing
        goes = self._goes(mine, lost)
        if goes:
            yield from _dropping(checkpoint)
        elif not finishing and not copies:
            yield from self._clearing(checkpoint)
        if checkpoint.copies and (lost or mine.mixture) and not goes:
            self._mourn(mine, lost)

    # -- lost shards ---------------------------------------------------------------------------

    def _copies(self, mine: Diagnosis) -> Iterator[Step]:
        id = mine.checkpoint.id
        for rank in range(self._world(mine)):
            bad = [copy for copy in mine.bad(rank) if copy.fragments is None]
            if mine.sound(rank) and not bad:
                continue
            source = next(iter(self._sources(mine, rank)), None)
            if source is None:
                continue
            for target in [copy.place for copy in bad] or self._homes_of(rank):
                word = "replace the damaged" if bad else "copy the missing"
                yield Step(
                    f"{word} shard {rank} of {id} in {target.label} from {source.place.label}",
                    partial(mend, source, target, id),
                )

    def _world(self, mine: Diagnosis) -> int:
        theirs = self._theirs.get(mine.checkpoint.id)
        record = mine.checkpoint.any_record or (theirs.checkpoint.any_record if theirs else None)
        return 0 if record is None else record.world

    def _sources(self, mine: Diagnosis, rank: int) -> list[Copy]:
        """Sound copies of a shard, here or in the other places."""
        theirs = self._theirs.get(mine.checkpoint.id)
        return [*mine.sound(rank), *(theirs.sound(rank) if theirs else ())]

    def _lost(self, mine: Diagnosis) -> list[int]:
        """Shards that are nowhere sound."""
        return [rank for rank in mine.lost if not self._sources(mine, rank)]

    def _homes_of(self, rank: int) -> list[Place]:
        """Where a lost shard goes: where the rank's others are, or to the only place there is."""
        every = [copy for one in self._ours.values() for copy in one.checkpoint.copies]
        homes = {c.place.label: c.place for c in every if c.rank == rank and c.fragments is None}
        return list(homes.values())[-1:] or list(self._here[:1] if len(self._here) == 1 else ())

    # -- what cannot be helped -------------------------------------------------------------------

    def _mourn(self, mine: Diagnosis, lost: Sequence[int]) -> None:
        checkpoint = mine.checkpoint
        whys = "; ".join([*map(mine.why, lost), *([mine.mixture] if mine.mixture else [])])
        if checkpoint.drafts or (checkpoint.missing and (checkpoint.age or 0) < self._limit):
            self.unfinished.append(f"{checkpoint.id} is not finished: {whys}")
        else:
            self.hopeless.append(f"{checkpoint.id}: {whys}")

    def _goes(self, mine: Diagnosis, lost: Sequence[int]) -> bool:
        """Whether a checkpoint that is of no use is to be removed."""
        checkpoint = mine.checkpoint
        behind = self._newest is not None and checkpoint.id < self._newest.id
        old = (checkpoint.age or 0) >= self._limit
        useless = bool(checkpoint.copies) and bool(lost or mine.mixture)
        return useless and behind and old and self._incomplete

    def _clearing(self, mine: Checkpoint) -> Iterator[Step]:
        for left in mine.leftovers:
            if left.age >= self._limit and not _holds_shards(left, mine):
                yield Step(f"remove {left.path} (untouched for {age(left.age)})", _removal(left))


def _is_sound(one: Diagnosis) -> bool:
    return one.checkpoint.whole and not one.lost and one.mixture is None


def _dropping(mine: Checkpoint) -> Iterator[Step]:
    state = "damaged" if mine.whole else mine.state
    for place in mine.places:
        word = f"remove {mine.id} from {place.label} ({state})"
        yield Step(word, partial(place.tier.drop, mine.id))


def _finishing(mine: Checkpoint) -> Iterator[Step]:
    """Publish a draft that has everything, and the files other tools read; tiers know how."""
    record = mine.any_record
    if not mine.whole or record is None:
        return
    for place in mine.places:
        for path, layout in damaged_headers(place, mine.id, record.catalog):
            yield Step(f"rewrite the header of {path}", partial(rewrite_header, path, layout))
        tier = place.tier
        if isinstance(tier, ExternalTier) and (wrong := tier.manifest_problem(mine.id)):
            word = f"write the manifest of {mine.id} in {place.label} anew ({wrong})"
            yield Step(word, partial(tier.write_manifest, mine.id))
        publish = getattr(tier, "publish", None)
        if publish is not None and problem_of(place, mine.id) is not None:
            yield Step(f"publish {mine.id} in {place.label}", partial(publish, mine.id))
    for left in mine.drafts:
        finish = getattr(left.place.tier, "finish", None)
        if finish is not None:
            yield Step(f"finish {mine.id} in {left.place.label}", partial(finish, mine.id))


def _remaking(mine: Checkpoint) -> Iterator[Step]:
    """Write fragments anew, so that as many nodes as before may be lost."""
    for place in mine.places:
        tier = place.tier
        if isinstance(tier, FragmentFolders) and (wrong := problem_of(place, mine.id)):
            word = f"write anew in {place.label} what is lost of {mine.id} ({wrong})"
            yield Step(word, partial(tier.remake, mine.id))


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
