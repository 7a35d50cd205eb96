"""Removing old checkpoints, tier by tier, once a newer one is whole there.

What runs that were killed in mid-save left unfinished goes as well, if it is of another attempt, of
no later step than the newest whole checkpoint of this one, and was not touched for an hour: two
runs may be writing to one place, and what either still writes to is not for the other to judge.
``tiers.leftovers`` has the rule in full.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from sapwood.checkpoint.retention import Policy, Saved, to_drop
from sapwood.errors import SapwoodError
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.leftovers import QUIET_SECONDS, Clearable, Stale
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import SHARED

__all__ = ["Pruner"]

log = logging.getLogger(__name__)


class Pruner:
    """Applies a policy to one tier, also to what earlier attempts left there."""

    def __init__(
        self,
        tier: Tier,
        policy: Policy,
        drop: Callable[[CheckpointId, str], None],
        *,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """``drop`` removes a checkpoint from the tier of that name, in the background.

        What is unfinished and has not changed for ``quiet`` seconds counts as left by the dead.
        """
        self._tier = tier
        self._policy = policy
        self._drop = drop
        self._quiet = quiet
        self._cleared = -math.inf
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
        self._clear(id)

    def _clear(self, id: CheckpointId) -> None:
        """Clear up after the dead; now and then, because it looks at every checkpoint's files."""
        now = time.monotonic()
        if not isinstance(self._tier, Clearable) or now - self._cleared < self._quiet:
            return
        self._cleared = now
        try:
            stale = Stale(attempt=id.attempt, step=id.step, quiet=self._quiet)
            for cleared in self._tier.clear(stale):
                log.info("tier %s: what was unfinished of %s is gone", self._tier.name, cleared)
        except SapwoodError as error:
            log.warning("tier %s was not cleared up: %s", self._tier.name, error)

    def _look(self) -> Sequence[Saved]:
        ranks: dict[CheckpointId, list[int]] = {}
        try:
            for stored in self._tier.shards():
                ranks.setdefault(stored.id, []).append(stored.rank)
        except SapwoodError as error:
            log.warning("tier %s cannot be listed: %s", self._tier.name, error)
        found = (self._read(id, there) for id, there in ranks.items())
        return [saved for saved in found if saved is not None]

    def _read(self, id: CheckpointId, ranks: Sequence[int]) -> Saved | None:
        """None if it is known not to be whole: it must not take a whole one's place."""
        try:
            with closing(self._tier.open(Stored(id, ranks[0]))) as shard:
                record = shard.record
                if self._tier.name in SHARED and len(ranks) < record.world:
                    return None
                metrics = record.extras.get("metrics", {})
                return Saved(id=id, created=record.created, metrics=metrics)
        except SapwoodError:  # damaged: old, and without a merit of its own
            return Saved(id=id, created=0.0)
