"""What each checkpoint cost: the three figures of the paper, and when it was safe where."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood.tiers.record import CheckpointId, Lineage

__all__ = ["CheckpointStats", "ReplicaDifference", "SaveFailure", "SaveReport"]


@dataclass(slots=True, kw_only=True)
class SaveReport:
    """One checkpoint, as this rank saw it."""

    id: CheckpointId
    mode: str
    nbytes: int
    """Size of this rank's shard."""
    created: float = 0.0
    """Seconds since the epoch."""
    metrics: dict[str, float] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    """Where it goes."""
    preparation_seconds: float = 0.0
    """Copying into staging memory, on any thread."""
    blocking_seconds: float = 0.0
    """What the training thread spent on it."""
    fence_seconds: float = 0.0
    """What updates waited for its copies."""
    overhead_seconds: float | None = None
    """This step and the next, longer than usual by so much; None until the next has ended."""
    durable: dict[str, float] = field(default_factory=dict)
    """Seconds from the end of the step until this rank's shard was safe, by tier."""
    whole: set[str] = field(default_factory=set)
    """Tiers in which the shards of all ranks are safe."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tiers that gave up, and why."""
    compared: bool | None = None
    """Whether two ranks agree on every byte; None: nothing is compared, see ``check_replicas``."""
    lineage: Lineage | None = None
    """Where the attempt that saved it came from."""

    @property
    def lasting(self) -> tuple[str, ...]:
        """The tiers that must have it for it to be saved: not memory, unless there is no other."""
        return tuple(tier for tier in self.tiers if tier != "memory") or self.tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """A checkpoint that this rank could not save."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """Some bytes of a tensor that are not the same on two ranks."""

    step: int
    ranks: tuple[int, int]
    """The one that saves these bytes, and the one that has others."""
    file: str
    """``model`` or ``optimizer``."""
    name: str
    start: int
    """The range of bytes that was compared, within the tensor."""
    stop: int

    def __str__(self) -> str:
        """For people."""
        owner, other = self.ranks
        what = f"{self.file} {self.name}, bytes {self.start} to {self.stop}"
        return f"ranks {owner} and {other}: {what if self.name else 'the tensors are not known'}"


@dataclass(slots=True)
class CheckpointStats:
    """All checkpoints of a run."""

    saves: list[SaveReport] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Steps that were due while both staging buffers were still on their way."""
    failures: list[SaveFailure] = field(default_factory=list)
    """Checkpoints that could not be captured, or that every lasting tier has given up."""
    failures_in_a_row: int = 0
    """How many of them came after the last one that was saved."""
    differences: list[ReplicaDifference] = field(default_factory=list)
    """Tensors in which replicas were found to differ, by all ranks."""

    def of(self, id: CheckpointId) -> SaveReport | None:
        """The report of a checkpoint."""
        return next((s for s in reversed(self.saves) if s.id == id), None)
