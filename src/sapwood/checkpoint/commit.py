"""Knowing that a checkpoint is whole: every rank counts its shard in the group's store.

No collective is involved, so nobody waits for anybody. When the ranks are dead the store is too,
and nobody needs to know: a restart looks at what is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from sapwood.checkpoint.order import Order
from sapwood.errors import SapwoodError
from sapwood.runtime.group import Group
from sapwood.tiers.record import CheckpointId

__all__ = ["Commit"]

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 1.0


class Commit:
    """Counts shards, and tells when a checkpoint is whole in a tier."""

    def __init__(
        self,
        group: Group,
        name: str,
        on_whole: Callable[[CheckpointId, str], None],
        *,
        watches: bool,
    ) -> None:
        """``on_whole`` is called on a thread of this object, where ``watches``: one per node.

        ``name`` is drawn for the checkpointer: all its ranks have the same, no other has it.
        """
        self._group = group
        self._prefix = f"ckpt/{name}"
        self._on_whole = on_whole
        self._watches = watches
        self._waiting: list[tuple[CheckpointId, str]] = []
        self._order = Order()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def durable(self, id: CheckpointId, tier: str) -> None:
        """This rank's shard is safe in a tier."""
        if self._group.world > 1:
            key = self._key(id, tier)
            try:
                if self._group.store.add(f"{key}/count", 1) == self._group.world:
                    self._group.store.set(f"{key}/whole", "1")
            except (SapwoodError, RuntimeError) as error:
                log.info("checkpoint %s is not counted, the group is gone: %s", id, error)
                return
        if self._watches:
            self._watch(id, tier)

    def close(self, timeout: float) -> None:
        """Wait for what is still counted, at most ``timeout`` seconds, and end the thread.

        In a group that failed nobody counts any more, and nothing is waited for.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._waiting, 0.0 if self._group.failed else timeout
            )
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5.0)

    def meet(self, timeout: float) -> None:
        """Wait until every rank has come here, or ``timeout`` seconds."""
        if self._group.world == 1:
            return
        store, key = self._group.store, f"{self._prefix}/done"
        try:
            if store.add(f"{key}/count", 1) == self._group.world:
                store.set(f"{key}/all", "1")
            store.wait(f"{key}/all", timeout)
        except (SapwoodError, RuntimeError) as error:
            log.info("the other ranks are not waited for, the group is gone: %s", error)

    def _key(self, id: CheckpointId, tier: str) -> str:
        # By attempt, too: a run that was set back comes to a step again, and counts it anew.
        return f"{self._prefix}/{id.attempt}/{id.step}/{tier}"

    def _watch(self, id: CheckpointId, tier: str) -> None:
        with self._changed:
            self._order.come(id)
            self._waiting.append((id, tier))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="sapwood-commit", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def _loop(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                waiting = list(self._waiting)
            # From the newest: one that becomes whole meanwhile was so before those behind it.
            found = [one for one in reversed(waiting) if self._is_whole(*one)][::-1]
            for id, tier in found:
                self._tell(id, tier)
            pause = _FIRST_PAUSE if found else min(pause * 1.5, _LAST_PAUSE)
            with self._changed:
                self._waiting = [
                    one
                    for one in self._waiting
                    if one not in found and not self._passed(one, found)
                ]
                self._changed.notify_all()
                if self._waiting:
                    self._changed.wait(pause)

    def _is_whole(self, id: CheckpointId, tier: str) -> bool:
        if self._group.world == 1:
            return True
        try:
            return self._group.store.has(f"{self._key(id, tier)}/whole")
        except (SapwoodError, RuntimeError):
            return False

    def _passed(
        self, one: tuple[CheckpointId, str], found: Sequence[tuple[CheckpointId, str]]
    ) -> bool:
        """Whether a newer checkpoint is whole in the tier: this one lacks a shard that failed.

        Every rank's shards come to a tier one after the other.
        """
        id, tier = one
        return any(tier == other and self._order.before(id, newer) for newer, other in found)

    def _tell(self, id: CheckpointId, tier: str) -> None:
        try:
            self._on_whole(id, tier)
        except Exception:
            # A user's callback must not end the thread that others depend on.
            log.exception("on_durable raised for checkpoint %s", id)
