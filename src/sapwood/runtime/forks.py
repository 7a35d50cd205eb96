"""Locks that are free in a forked child, whatever threads of its parent were doing."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from weakref import WeakSet

__all__ = ["ForkLock"]

_PATIENCE = 5.0
"""Seconds a fork waits for threads to leave what they guard."""
_TURN = 0.05


class ForkLock:
    """A reentrant lock to be used with ``with``.

    A fork copies a lock that another thread holds, but not the thread that would release it, so
    that the child would wait for ever. A fork therefore waits until all of these are free. What
    they guard is whole in the child, too, unless that takes longer than five seconds.
    """

    def __init__(self) -> None:
        """Free, and known to the next fork."""
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        """Wait until it is free, and hold it."""
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release it."""
        self._lock.release()

    def held(self, seconds: float) -> bool:
        """Hold it if it becomes free in time."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        """Undo ``held``."""
        self._lock.release()

    def replace(self) -> None:
        """In a child: its holder is not there."""
        self._lock = threading.RLock()


_locks: WeakSet[ForkLock] = WeakSet()
_holding = threading.local()


def _hold_all() -> None:
    deadline = time.monotonic() + _PATIENCE
    locks = list(_locks)
    held = _hold(locks)
    while len(held) < len(locks) and time.monotonic() < deadline:
        # All are let go first: whoever holds the missing one may be waiting for one of these.
        _release(held)
        time.sleep(0.001)
        held = _hold(locks)
    _holding.locks = held


def _hold(locks: list[ForkLock]) -> list[ForkLock]:
    held = []
    for lock in locks:
        if not lock.held(_TURN):
            break
        held.append(lock)
    return held


def _release(held: list[ForkLock]) -> None:
    for lock in reversed(held):
        lock.release()


def _in_parent() -> None:
    _release(_holding.__dict__.pop("locks", []))


def _in_child() -> None:
    held = _holding.__dict__.pop("locks", [])
    _release(held)
    for lock in set(_locks).difference(held):
        lock.replace()


os.register_at_fork(before=_hold_all, after_in_parent=_in_parent, after_in_child=_in_child)
