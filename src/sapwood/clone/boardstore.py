"""A fork's board as a store of torch's, through which transports exchange their addresses."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from sapwood.clone.remote import BoardAccess
from sapwood.runtime.stores import Store

__all__ = ["BoardStore"]


class BoardStore(Store):
    """The keys of one fork. Errors are ``RuntimeError``, as those of torch's own stores.

    Keep it as long as a store that was made from it is used: that one has only torch's half of it.
    """

    def __init__(self, board: BoardAccess, prefix: str, *, timeout: float) -> None:
        """``timeout``: seconds to wait for a key that somebody is about to write."""
        super().__init__()
        self._board, self._prefix, self._seconds = board, prefix, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._try(lambda: self._board.set(self._prefix + key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a key and read it."""
        self.wait([key])
        value = self._try(lambda: self._board.get(self._prefix + key))
        if value is None:
            raise RuntimeError(f"{key} was removed")
        found: bytes = value
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return int(self._try(lambda: self._board.add(self._prefix + key, amount)))

    def check(self, keys: list[str]) -> bool:
        """Whether all are written."""
        names = [self._prefix + key for key in keys]
        return all(self._try(lambda name=name: self._board.get(name)) is not None for name in names)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all are written."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        for key in keys:
            left = max(deadline - time.monotonic(), 0.0)
            name = [self._prefix + key]
            if self._try(lambda name=name, left=left: self._board.wait_any(name, left)) is None:
                raise RuntimeError(f"wait timed out after {seconds:g} s: nobody has written {key}")

    def delete_key(self, key: str) -> bool:
        """Forget; whether it was there."""
        return bool(self._try(lambda: self._board.delete(self._prefix + key)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write if ``expected`` is there; what then is there."""
        name = self._prefix + key
        found: bytes = self._try(
            lambda: self._board.compare_set(name, _bytes(expected), _bytes(desired))
        )
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for a key from now on."""
        self._seconds = timeout.total_seconds()

    def _try(self, act: Any) -> Any:
        try:
            return act()
        except OSError as error:
            raise RuntimeError(f"the donors' board is gone: {error}") from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
