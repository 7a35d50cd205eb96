"""Removing old checkpoints, tier by tier, once a newer one is whole there.

What runs that were killed in mid-save left unfinished goes as well, if it is of another attempt, of
no later step than the newest whole checkpoint of this one, and was not touched for an hour: two
runs may be writing to one place, and what either still writes to is not for the other to judge.
``tiers.leftovers`` has the rule in full.

A tier that is full is the exception: nothing newer can become whole there, so what the next one
would replace goes before it, down to the newest that is whole.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from sapwood.checkpoint.retention import Policy, Saved, to_drop
from sapwood.errors import SapwoodError
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.leftovers import QUIET_SECONDS, Clearable, Stale
from sapwood.tiers.metrics import metrics_of
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import SHARED

__all__ = ["Pruner"]

log = logging.getLogger(__name__)


class Pruner:
    """Applies a policy to one tier, also to what earlier attempts left there."""

    def __init__(
        self,
        tier: Tier,
        policy: Policy | None,
        drop: Callable[[CheckpointId, str], None],
        *,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """``drop`` removes a checkpoint from the tier of that name, in the background.

        Without a ``policy`` all that are whole stay. What is unfinished and has not changed for
        ``quiet`` seconds counts as left by the dead.
        """
        self._tier = tier
        self._policy = policy
        self._drop = drop
        self._quiet = quiet
        self._cleared = -math.inf
        self._saved: dict[CheckpointId, Saved] | None = None
        self._whole: set[CheckpointId] = set()  # those of which it is certain
        self._lock = threading.RLock()  # room is wanted on another thread than wholes are told

    def whole(self, id: CheckpointId, created: float, metrics: dict[str, float]) -> None:
        """A new checkpoint is whole in the tier: what is no longer needed can go."""
        with self._lock:
            self._whole.add(id)
            if self._policy is not None:
                if self._saved is None:
                    self._saved = {s.id: s for s in self._look() if s.id != id}
                self._saved[id] = Saved(id=id, created=created, metrics=metrics)
                for gone in self._going(self._saved.values(), id):
                    self._let_go(gone)
        self._clear(id)

    def make_room(self, id: CheckpointId) -> None:
        """There is no room for a checkpoint: the oldest of those goes that it would replace.

        Never the newest that is known to be whole, which may be all there is for a while.
        """
        if self._policy is None:
            return
        with self._lock:
            # Not what was known: whoever else is short of room may have removed some.
            saved = [s for s in self._look() if s.id in self._whole and s.id != id]
            older = [s for s in saved if s.id.step <= id.step]
            newest = max(older, key=lambda s: (s.id.step, s.created), default=None)
            coming = Saved(id=id, created=time.time())
            for gone in self._going([*older, coming], id):
                if newest is not None and gone != newest.id:
                    name = self._tier.name
                    log.warning("tier %s has no room for %s: %s goes at once", name, id, gone)
                    self._let_go(gone)
                    return

    def discard(self, ids: Sequence[CheckpointId]) -> None:
        """Remove checkpoints that nobody has heard of as whole, unless all their shards are there.

        A newer one is whole, so that nobody writes to them any more.
        """
        if not ids:
            return
        with self._lock:
            ranks = self._ranks()
            for id in ids:
                saved = self._read(id, ranks[id]) if id in ranks else None
                if saved is None or id not in self._whole:
                    self._let_go(id)
                elif self._saved is not None:
                    self._saved[id] = saved

    def _going(self, saved: Iterable[Saved], id: CheckpointId) -> list[CheckpointId]:
        """What need not be kept once ``id`` is whole, oldest first."""
        # Of an attempt that got further before it was restored from an older step, nothing newer
        # than this is touched: it is not ours to judge.
        assert self._policy is not None
        return to_drop([s for s in saved if s.id.step <= id.step], self._policy)

    def _let_go(self, id: CheckpointId) -> None:
        self._whole.discard(id)
        if self._saved is not None:
            self._saved.pop(id, None)
        self._drop(id, self._tier.name)

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
        found = (self._read(id, there) for id, there in self._ranks().items())
        return [saved for saved in found if saved is not None]

    def _ranks(self) -> dict[CheckpointId, list[int]]:
        """Whose shards are there."""
        ranks: dict[CheckpointId, list[int]] = {}
        try:
            for stored in self._tier.shards():
                ranks.setdefault(stored.id, []).append(stored.rank)
        except SapwoodError as error:
            log.warning("tier %s cannot be listed: %s", self._tier.name, error)
        return ranks

    def _read(self, id: CheckpointId, ranks: Sequence[int]) -> Saved | None:
        """None if it is known not to be whole: it must not take a whole one's place."""
        try:
            with closing(self._tier.open(Stored(id, ranks[0]))) as shard:
                record = shard.record
                if len(ranks) >= record.world:
                    self._whole.add(id)
                if self._tier.name in SHARED and len(ranks) < record.world:
                    return None
                metrics = metrics_of(record.extras)
                return Saved(id=id, created=record.created, metrics=metrics)
        except SapwoodError:  # damaged: old, and without a merit of its own
            return Saved(id=id, created=0.0)
