"""The contract between a rank, which captures, and an engine, which carries shards to tiers.

    rank                                      engine
    lend(arena)        ── descriptor ──>      maps it
    submit(job)        ── a few KB ────>      checksums, then tier after tier, each at its own pace
                       <── Freed ───────      the arena may be filled again
                       <── Durable ─────      the shard is safe in a tier
                       <── Failed ──────      a tier failed; it was reported, and is tried again
                       <── NoRoom ──────      a tier is full: whoever may remove from it hears this

An engine is a process of its own per node, which outlives the ranks, or a thread of the rank
(``sync`` mode); both run the same ``Pipeline``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sapwood.buffers import Arena
from sapwood.state.shards import ShardPlan
from sapwood.tiers.record import CheckpointId, Lineage

__all__ = ["Durable", "Engine", "Failed", "Freed", "Job", "Listener", "NoRoom", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A captured shard: its bytes are in a lent arena and do not change until it is freed."""

    id: CheckpointId
    rank: int
    arena: int
    """As ``Engine.lend`` numbered it."""
    plan: ShardPlan
    created: float
    extras: Mapping[str, Any]
    tiers: tuple[str, ...]
    """The tiers this checkpoint goes to; each has its own interval."""
    lineage: Lineage | None = None
    """Where the attempt came from, for the record."""
    extras_bytes: int = 0
    """Size of what the extras refer to, behind the shard's pieces in the arena."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that belong to it."""
        return self.plan.shards[self.rank].nbytes_with(self.extras_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """An arena may be filled again."""

    arena: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A shard is safe in a tier."""

    id: CheckpointId
    rank: int
    tier: str
    nbytes: int
    """Bytes written for it: fewer than the shard has where ranges were unchanged."""
    seconds: float
    """From ``submit`` until now."""
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A tier could not keep a shard this time."""

    id: CheckpointId
    rank: int
    tier: str
    message: str
    final: bool
    """No more tries: the checkpoint will not be in this tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """A tier has no room for a checkpoint; all ranks of the node hear it, whoever's shard it is.

    What is dropped from the tier now makes room before the next try.
    """

    id: CheckpointId
    tier: str


Progress = Freed | Durable | Failed | NoRoom
Listener = Callable[[Progress], None]
"""Called on a thread of the engine's client, never on the training thread."""


class Engine(Protocol):
    """What a rank sees of an engine."""

    def lend(self, arena: Arena) -> int:
        """Let the engine read an arena; the number is the arena's name from now on."""
        ...

    def recall(self, arena: int) -> None:
        """Take a free arena back: the engine forgets it."""
        ...

    def submit(self, job: Job) -> None:
        """Hand over a captured shard; returns at once (in ``sync`` mode: when it is durable).

        Raises:
            CheckpointError: the engine is gone.
        """
        ...

    def drop(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """Remove this node's part of a checkpoint from these tiers, in the background."""
        ...

    def mend(self, id: CheckpointId) -> None:
        """Give nodes back what they kept of a checkpoint and have lost, in the background."""
        ...

    def drain(self, timeout: float) -> bool:
        """Wait until everything submitted is done or given up; False if not in time."""
        ...

    def close(self, timeout: float) -> None:
        """Finish what was submitted, then end."""
        ...
