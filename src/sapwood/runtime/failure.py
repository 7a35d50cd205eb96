"""A board in the group's store where a failing rank leaves word, so that no other rank hangs.

A collective cannot say why a peer is missing: it waits. Whoever waits longer than a moment looks
at the board; whoever fails, or leaves, writes to it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sapwood.errors import DeadlineError, PeerFailed

if TYPE_CHECKING:
    from sapwood.runtime.bounded import BoundedStore

__all__ = ["FailureBoard"]

# A store that does not answer in this time has no news for us; who waits has a deadline anyway.
_PATIENCE = 2.0

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureBoard:
    """The first failure of a group, visible to every rank."""

    _KEY = "failed"
    _LEFT = "left"
    _AWARE = "aware"

    def __init__(self, store: BoundedStore, rank: int) -> None:
        """``store`` is the group's own (a prefix of it), used by all ranks alike."""
        self._store = store
        self._rank = rank
        self._aware = False
        self._lost: PeerFailed | None = None
        self.posted = False
        """Whether this rank has told of a failure."""
        self.uncaught: BaseException | None = None
        """The exception that is ending this process, if one is."""
        self._previous: ExceptHook | None = None
        self._watching = False
        self._hook: ExceptHook = self._on_uncaught

    def post(self, message: str, *, own: bool = True) -> None:
        """Tell the others; only the first message of the group is kept. Never raises.

        Args:
            message: what happened.
            own: False when this rank only saw another one fail.
        """
        if self.posted:
            return
        self.posted = True
        entry = json.dumps({"rank": self._rank, "message": message[:4000], "own": own})
        try:
            self._store.compare_set(self._KEY, "", entry, timeout=_PATIENCE)
            self._count_me()
        except Exception:  # the store may be what failed; the caller has an error of its own
            return

    def lose(self, rank: int, reason: str) -> None:
        """Remember a rank that was killed: it leaves no word, and whoever waits for it must know.

        Any thread may call it; the store is not asked.
        """
        if self._lost is None:
            message = f"lost rank {rank}: it died or was killed ({reason})"
            self._lost = PeerFailed(message, rank=rank)

    def pass_on(self, failure: PeerFailed) -> None:
        """Tell ranks of other machines what only this one can have noticed. Never raises."""
        if failure is self._lost:
            self.post(str(failure), own=False)

    def read(self, step: int) -> PeerFailed | None:
        """The group's first failure, a rank that left before ``step``, or a rank that was lost.

        Nothing of one's own.
        """
        try:
            failed = self._entry(self._KEY)
            left = self._entry(self._LEFT)
            if failed is not None:
                self._count_me()
        except DeadlineError:
            return self._lost
        except Exception as error:
            return PeerFailed(
                f"the group's store is gone ({error}); the process that hosted it, rank 0 or the "
                "launcher, has ended"
            )
        if failed is not None and failed["rank"] != self._rank:
            return _as_error(failed)
        if left is not None and left["rank"] != self._rank and left["step"] < step:
            return PeerFailed(
                f"rank {left['rank']} left the run after {left['step']} steps; give every rank the "
                "same number of batches",
                rank=left["rank"],
            )
        return self._lost

    def linger(self, world: int, seconds: float) -> None:
        """Wait until all ranks know of the failure. Never raises, never takes longer."""
        deadline = time.monotonic() + seconds
        try:
            while self._store.add(self._AWARE, 0, timeout=_PATIENCE) < world:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)
        except Exception:  # nobody is left to wait for
            return

    def _count_me(self) -> None:
        if not self._aware:
            self._aware = True
            self._store.add(self._AWARE, 1, timeout=_PATIENCE)

    def _entry(self, key: str) -> dict[str, Any] | None:
        if not self._store.has(key, timeout=_PATIENCE):
            return None
        entry: dict[str, Any] = json.loads(self._store.get(key, timeout=_PATIENCE))
        return entry

    def leave(self, step: int) -> None:
        """Say that this rank ended its part after ``step`` steps. Never raises.

        The rank that left earliest is kept: it is the one the others will miss.
        """
        mine = json.dumps({"rank": self._rank, "step": step})
        try:
            there = self._store.compare_set(self._LEFT, "", mine, timeout=_PATIENCE).decode()
            while json.loads(there)["step"] > step:
                there = self._store.compare_set(self._LEFT, there, mine, timeout=_PATIENCE).decode()
        except Exception:  # nobody is left to read it
            return

    def watch_uncaught(self) -> None:
        """Post any exception that ends this process, until ``unwatch``."""
        self._previous = sys.excepthook
        self._watching = True
        sys.excepthook = self._hook

    def unwatch(self) -> None:
        """Put the previous excepthook back; if somebody hooked after us, only look away."""
        self._watching = False
        if sys.excepthook is self._hook and self._previous is not None:
            sys.excepthook = self._previous

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._watching:
            self.uncaught = error
            self.post(f"{kind.__name__}: {error}")
        (self._previous or sys.__excepthook__)(kind, error, trace)


def _as_error(entry: dict[str, Any]) -> PeerFailed:
    rank, message = entry["rank"], entry["message"]
    if entry["own"]:
        return PeerFailed(f"rank {rank} failed: {message}", rank=rank)
    return PeerFailed(f"rank {rank} reports: {message}")
