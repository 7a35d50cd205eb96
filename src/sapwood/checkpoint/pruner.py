"""Removing old checkpoints, tier by tier, once a newer one is whole there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing

from sapwood.checkpoint.retention import Policy, Saved, to_drop
from sapwood.errors import SapwoodError
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.record import CheckpointId

__all__ = ["Pruner"]

log = logging.getLogger(__name__)


class Pruner:
    """Applies a policy to one tier, also to what earlier attempts left there."""

    def __init__(
        self, tier: Tier, policy: Policy, drop: Callable[[CheckpointId, str], None]
    ) -> None:
        """``drop`` removes a checkpoint from the tier of that name, in the background."""
        self._tier = tier
        self._policy = policy
        self._drop = drop
        self._saved: dict[CheckpointId, Saved] | None = None

    def whole(self, id: CheckpointId, created: float, metrics: dict[str, float]) -> None:
        """A new checkpoint is whole in the tier: what is no longer needed can go."""
        if self._saved is None:
            self._saved = {s.id: s for s in self._look() if s.id != id}
        self._saved[id] = Saved(id=id, created=created, metrics=metrics)
        # Of an attempt that got further before it was restored from an older step, nothing newer
        # than this is touched: it is not ours to judge.
        older = [s for s in self._saved.values() if s.id.step <= id.step]
        for gone in to_drop(older, self._policy):
            del self._saved[gone]
            self._drop(gone, self._tier.name)

    def _look(self) -> Sequence[Saved]:
        found: dict[CheckpointId, Saved] = {}
        try:
            for stored in self._tier.shards():
                if stored.id not in found:
                    found[stored.id] = self._read(stored)
        except SapwoodError as error:
            log.warning("tier %s cannot be listed: %s", self._tier.name, error)
        return list(found.values())

    def _read(self, stored: Stored) -> Saved:
        try:
            with closing(self._tier.open(stored)) as shard:
                metrics = shard.record.extras.get("metrics", {})
                return Saved(id=stored.id, created=shard.record.created, metrics=metrics)
        except SapwoodError:  # damaged: old, and without a merit of its own
            return Saved(id=stored.id, created=0.0)
