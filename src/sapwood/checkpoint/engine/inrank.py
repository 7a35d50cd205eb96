"""The ``sync`` engine: the same pipeline in the rank itself, which waits for it."""

from __future__ import annotations

from itertools import count

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.base import Freed, Job, Listener
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.errors import CheckpointError
from sapwood.tiers.record import CheckpointId

__all__ = ["InRank"]


class InRank:
    """Carries shards on in this process; ``submit`` returns when they are durable."""

    def __init__(self, pipeline: Pipeline, listener: Listener, *, timeout: float) -> None:
        """``timeout``: seconds a checkpoint may take."""
        self._pipeline = pipeline
        self._listener = listener
        self._timeout = timeout
        self._arenas: dict[int, Arena] = {}
        self._numbers = count()

    def lend(self, arena: Arena) -> int:
        """Remember the arena."""
        number = next(self._numbers)
        self._arenas[number] = arena
        return number

    def recall(self, arena: int) -> None:
        """Forget it."""
        self._arenas.pop(arena, None)

    def submit(self, job: Job) -> None:
        """Carry the shard to all its tiers."""
        arena = lent = self._arenas[job.arena]
        if job.extras_bytes:
            try:
                arena = lent.mapped_anew()  # they lie behind the mapping it was made with
            except OSError:
                self._listener(Freed(arena=job.arena))
                raise

        def given_back() -> None:
            if arena is not lent:
                arena.close()
            self._listener(Freed(arena=job.arena))

        self._pipeline.submit(job, arena.bytes[: job.nbytes], given_back)
        if not self.drain(self._timeout):
            raise CheckpointError(f"checkpoint {job.id} took longer than {self._timeout:g} s")

    def drop(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """Remove a checkpoint from these tiers."""
        self._pipeline.drop(id, tiers)

    def mend(self, id: CheckpointId) -> None:
        """Give nodes back what they have lost of a checkpoint; ``drain`` waits for it."""
        self._pipeline.mend(id)

    def drain(self, timeout: float) -> bool:
        """Wait for what is on its way."""
        return self._pipeline.drain(timeout)

    def close(self, timeout: float) -> None:
        """End the pipeline."""
        self._pipeline.close(timeout)
