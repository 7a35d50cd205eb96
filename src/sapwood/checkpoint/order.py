"""The order in which a checkpointer took its checkpoints: after a restore, steps come again."""

from __future__ import annotations

from sapwood.tiers.identity import CheckpointId

__all__ = ["Order"]


class Order:
    """Attempts by when they were first heard of, and their checkpoints by step.

    A restore waits for what the attempt before it has under way, so that attempts never mix.
    """

    def __init__(self) -> None:
        """Nothing was heard of yet."""
        self._attempts: dict[str, int] = {}

    def come(self, id: CheckpointId) -> None:
        """A checkpoint was heard of."""
        self._attempts.setdefault(id.attempt, len(self._attempts))

    def before(self, one: CheckpointId, other: CheckpointId) -> bool:
        """Whether one was taken before the other."""
        return self._place(one) < self._place(other)

    def _place(self, id: CheckpointId) -> tuple[int, int]:
        return self._attempts.get(id.attempt, len(self._attempts)), id.step
