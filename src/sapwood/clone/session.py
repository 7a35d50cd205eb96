"""What both sides of a fork tell each other while it is under way, on the board of donor 0.

manifest    what is sent, and how
agreed      clones that have the same model
posted      clones that are ready to receive
opened      donors that are ready to send
armed       all are ready: donors look for the step from now on
looking     donors that do
fire        the step whose state is sent
extras/n    the file with what donor n has beside tensors, in a fork through files
ready       all clones have begun
failed      none does, and why
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sapwood.clone.boardstore import BoardStore
from sapwood.clone.remote import BoardAccess
from sapwood.errors import CloneError

__all__ = ["BoardGone", "Session", "prefix_of"]

T = TypeVar("T")
_CHUNK = 20.0
"""Seconds of one wait on the server's side."""


class BoardGone(CloneError):
    """Rank 0 of the donors, which keeps the board, cannot be reached."""


def prefix_of(name: str) -> str:
    """Where a fork's keys are."""
    return f"fork/{name}/"


class Session:
    """One side's view of one fork; every call ends in time."""

    def __init__(
        self, board: BoardAccess, name: str, *, timeout: float, owns_board: bool = False
    ) -> None:
        """``timeout``: seconds for the board's answer; ``owns_board``: close it at the end."""
        self.name = name
        self.raw = BoardStore(board, prefix_of(name), timeout=timeout)
        self._board, self._prefix, self._owns = board, prefix_of(name), owns_board

    def count(self, key: str) -> int:
        """Say that this side has come so far; how many have."""
        return self._try(lambda: self._board.add(self._prefix + key, 1))

    def say(self, key: str, value: Any) -> None:
        """Leave a plain value.

        Raises:
            BoardGone: it could not be left.
        """
        self._try(lambda: self._board.set(self._prefix + key, json.dumps(value).encode()))

    def heard(self, key: str, timeout: float | None = None) -> Any:
        """What was left, or None; ``timeout``: seconds for the answer, if not the usual."""
        value = self._try(lambda: self._board.get(self._prefix + key, timeout))
        return None if value is None else json.loads(value)

    def fail(self, why: str) -> None:
        """Nobody shall begin; the first reason counts."""
        try:
            self._board.compare_set(self._prefix + "failed", b"", json.dumps(why).encode())
        except OSError:
            return  # they are gone, and need no word

    def check(self) -> None:
        """Raise if the fork has failed.

        Raises:
            CloneError: it has.
        """
        why = self.heard("failed")
        if why is not None:
            raise CloneError(str(why))

    def hear(self, key: str, what: str, timeout: float) -> Any:
        """Wait until a value is left.

        Raises:
            CloneError: the fork failed meanwhile, or it took longer than ``timeout`` seconds.
        """
        self._wait(key, None, what, timeout)
        return self.heard(key)

    def hear_count(self, key: str, count: int, what: str, timeout: float) -> None:
        """Wait until so many have come so far.

        Raises:
            CloneError: the fork failed meanwhile, or it took longer than ``timeout`` seconds.
        """
        if count > 0:
            self._wait(key, count, what, timeout)

    def close(self) -> None:
        """Ask no more."""
        if self._owns:
            self._board.close()

    def _wait(self, key: str, at_least: int | None, what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        keys = [self._prefix + key, self._prefix + "failed"]
        while (left := deadline - time.monotonic()) > 0:
            found = self._try(partial(self._board.wait_any, keys, min(left, _CHUNK), at_least))
            if found == keys[0]:
                return
            if found is not None:
                self.check()
        raise CloneError(f"{what}: nothing for {timeout:g} s")

    def _try(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            raise BoardGone(f"the run to be cloned is gone, or does not answer: {error}") from error
