"""What a pipeline removes from its tiers: old checkpoints, and what it had to give up itself.

A tier's thread carries it out, in its turn, or while it waits to try a shard again: on a full disk
the shard it is trying is waiting for that very removal.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from sapwood.errors import SapwoodError
from sapwood.tiers.base import Tier
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.room import Abandonable

__all__ = ["Removals"]

log = logging.getLogger(__name__)


class Removals:
    """The removals of a pipeline that are still to be done; its tiers' threads do them."""

    def __init__(self, tiers: Mapping[str, Tier]) -> None:
        """Nothing is to be done yet."""
        self._tiers = tiers
        self._waiting: dict[str, deque[CheckpointId]] = {name: deque() for name in tiers}
        self._given_up: dict[str, dict[CheckpointId, None]] = {name: {} for name in tiers}
        self._changed = threading.Condition()
        self._over = False

    def add(self, name: str, id: CheckpointId) -> None:
        """A checkpoint is to go from a tier; ``run`` does it, or ``pause``."""
        with self._changed:
            self._waiting[name].append(id)
            self._changed.notify_all()

    def run(self, name: str) -> None:
        """Remove what is to go from a tier."""
        while True:
            with self._changed:
                if not self._waiting[name]:
                    return
                id = self._waiting[name].popleft()
            self.remove(name, id)

    def pause(self, name: str, seconds: float) -> None:
        """Wait before a shard is tried again: no longer than until something went from its tier."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._waiting[name], seconds)
        self.run(name)

    def end(self, *, over: bool = True) -> None:
        """Whether nobody is to wait any more, now or later."""
        with self._changed:
            self._over = over
            self._changed.notify_all()

    def remove(self, name: str, id: CheckpointId) -> None:
        """Remove a checkpoint from a tier; what goes wrong is logged."""
        try:
            self._tiers[name].drop(id)
        except Exception as error:
            _complain(name, id, error)

    # -- what came to nothing ------------------------------------------------------------------

    def give_up(self, name: str, id: CheckpointId) -> None:
        """A shard of a checkpoint found no room in a tier: what is there of it is of no use."""
        self._given_up[name][id] = None
        self._abandon(name, id)

    def reclaim(self, name: str, id: CheckpointId) -> bool:
        """Remove what came to nothing before ``id``, and others have added to since.

        Whether there was any: ranks that came later may have brought their shards of it.
        """
        known = [other for other in self._given_up[name] if other != id]
        for other in known:
            self._abandon(name, other)
            del self._given_up[name][other]
        return bool(known)

    def _abandon(self, name: str, id: CheckpointId) -> None:
        tier = self._tiers[name]
        if not isinstance(tier, Abandonable):
            return
        try:
            tier.abandon(id)
        except Exception as error:
            _complain(name, id, error)


def _complain(name: str, id: CheckpointId, error: Exception) -> None:
    told = None if isinstance(error, SapwoodError) else error
    log.warning("tier %s: checkpoint %s was not removed: %s", name, id, error, exc_info=told)
