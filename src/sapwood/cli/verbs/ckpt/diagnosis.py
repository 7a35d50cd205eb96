"""Which copies of a checkpoint's shards are sound: every byte of them is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sapwood.cli.verbs.ckpt.content import gaps
from sapwood.cli.verbs.ckpt.survey import Checkpoint, Copy
from sapwood.cli.verbs.ckpt.verify import check_copy
from sapwood.errors import CheckpointError

__all__ = ["Diagnosis", "bytes_of", "diagnose", "why_unsound"]


@dataclass(frozen=True)
class Diagnosis:
    """What was found of one checkpoint."""

    checkpoint: Checkpoint
    problems: tuple[str | None, ...]
    """What is wrong with each copy; None with a sound one."""
    mixture: str | None = None
    """Why shards that are all there do not make a checkpoint together; None if they do."""

    def sound(self, rank: int) -> list[Copy]:
        """The copies of a shard of which every byte is as it was saved."""
        rows = zip(self.checkpoint.copies, self.problems, strict=True)
        return [copy for copy, problem in rows if copy.rank == rank and problem is None]

    def bad(self, rank: int) -> list[Copy]:
        """The others."""
        rows = zip(self.checkpoint.copies, self.problems, strict=True)
        return [copy for copy, problem in rows if copy.rank == rank and problem is not None]

    @property
    def lost(self) -> list[int]:
        """Shards of which no copy is sound."""
        record = self.checkpoint.any_record
        ranks = range(record.world) if record else sorted({c.rank for c in self.checkpoint.copies})
        return [rank for rank in ranks if not self.sound(rank)]

    def why(self, rank: int) -> str:
        """What is wrong with a shard that is lost."""
        rows = zip(self.checkpoint.copies, self.problems, strict=True)
        found = [f"in {c.place.label}: {p}" for c, p in rows if c.rank == rank and p is not None]
        return f"shard {rank} is " + ("; ".join(["damaged", *found]) if found else "missing")


def diagnose(checkpoint: Checkpoint, advance: Callable[[int], None] = lambda n: None) -> Diagnosis:
    """Read every copy of every shard."""
    problems = []
    for copy in checkpoint.copies:
        damage = next(check_copy(copy, checkpoint.id, advance), None)
        problems.append(None if damage is None else damage.problem)
    return Diagnosis(checkpoint, tuple(problems), _mixture(checkpoint))


def why_unsound(checkpoint: Checkpoint, advance: Callable[[int], None]) -> str | None:
    """Why a checkpoint could not be restored from what is there; None if it can.

    Reads one sound copy of each shard, and not the others.
    """
    record = checkpoint.any_record
    if not checkpoint.whole or record is None:
        return checkpoint.state
    mixture = _mixture(checkpoint)
    if mixture is not None:
        return mixture
    for rank in range(record.world):
        copies = [copy for copy in checkpoint.copies if copy.rank == rank]
        problem = _first_problem(checkpoint, copies, advance)
        if problem is not None:
            return problem
    return None


def _mixture(checkpoint: Checkpoint) -> str | None:
    if not checkpoint.whole:
        return None
    try:
        return "; ".join(gaps(checkpoint)) or None
    except CheckpointError as error:
        return str(error)


def _first_problem(
    checkpoint: Checkpoint, copies: Sequence[Copy], advance: Callable[[int], None]
) -> str | None:
    problem: str | None = "a shard is missing"
    for copy in copies:
        damage = next(check_copy(copy, checkpoint.id, advance), None)
        if damage is None:
            return None
        problem = damage.problem
    return problem


def bytes_of(checkpoints: Iterable[Checkpoint]) -> int:
    """What reading every copy of these will read."""
    records = [c.record for one in checkpoints for c in one.copies if c.record is not None]
    return sum(part.nbytes for record in records for part in record.ranges)
