"""What both sides of a fork tell each other, kept by rank 0 of the donors: keys and bytes.

A reader may wait for a key on the server's side, so nobody asks again and again. A fork that is
over leaves a few words behind, of which only the last forks' are kept: a run that is forked for
weeks does not grow by it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from sapwood.channel.connection import ChannelError

__all__ = ["Board"]

_REMEMBERED = 64
"""Forks that are over and whose last words can still be heard."""
LAST_WORDS = ("failed", "ready", "fire")


class Board:
    """Keys and bytes, and threads that wait for them. Safe for any number of threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, bytes] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Write."""
        with self._changed:
            self._write(key, value)

    def get(self, key: str, timeout: float | None = None) -> bytes | None:
        """Read what is there, or None; it takes no time here."""
        with self._changed:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            if amount:
                self._write(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Write if ``expected`` is there (empty: nothing); what then is there."""
        with self._changed:
            found = self._values.get(key, b"")
            if found != expected:
                return found
            self._write(key, value)
            return value

    def delete(self, key: str) -> bool:
        """Forget; whether it was there."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def wait_any(self, keys: list[str], seconds: float, at_least: int | None = None) -> str | None:
        """The first of ``keys`` that is written, None after ``seconds``.

        With ``at_least`` the first key is a number that must be as large.

        Raises:
            ChannelError: the board is closed.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if self._closed:
                    raise ChannelError("the run has ended")
                for number, key in enumerate(keys):
                    value = self._values.get(key)
                    if value is None:
                        continue
                    if number or at_least is None or int(value) >= at_least:
                        return key
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def end(self, prefix: str) -> None:
        """A fork is over: forget all below ``prefix`` but its last words."""
        with self._changed:
            for key in [k for k in self._values if k.startswith(prefix)]:
                if key.removeprefix(prefix) not in LAST_WORDS:
                    del self._values[key]
            self._over[prefix] = None
            while len(self._over) > _REMEMBERED:
                oldest, _ = self._over.popitem(last=False)
                for word in LAST_WORDS:
                    self._values.pop(oldest + word, None)

    def close(self) -> None:
        """Wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """What is kept."""
        with self._changed:
            return sum(len(key) + len(value) for key, value in self._values.items())

    def _write(self, key: str, value: bytes) -> None:
        # What comes too late for a fork that is over would stay for ever.
        if any(key.startswith(prefix) for prefix in self._over) and not key.endswith(LAST_WORDS):
            return
        self._values[key] = value
        self._changed.notify_all()
