"""A board in the group's store where a failing rank leaves word, so that no other rank hangs.

A collective cannot say why a peer is missing: it waits. Whoever waits longer than a moment looks
at the board; whoever fails, or leaves, writes to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sapwood.errors import PeerFailed

if TYPE_CHECKING:
    from sapwood.runtime.stores import Store

__all__ = ["FailureBoard"]

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureBoard:
    """The first failure of a group, visible to every rank."""

    _KEY = "failed"
    _LEFT = "left"

    def __init__(self, store: Store, rank: int) -> None:
        """``store`` is the group's own (a prefix of it), used by all ranks alike."""
        self._store = store
        self._rank = rank
        self._posted = False
        self.uncaught: BaseException | None = None
        """The exception that is ending this process, if one is."""
        self._previous: ExceptHook | None = None
        self._hook: ExceptHook = self._on_uncaught

    def post(self, message: str) -> None:
        """Tell the others; only the first message of the group is kept. Never raises."""
        if self._posted:
            return
        self._posted = True
        entry = json.dumps({"rank": self._rank, "message": message[:4000]})
        try:
            self._store.compare_set(self._KEY, "", entry)
        except Exception:  # the store may be what failed; the caller has an error of its own
            return

    def read(self, step: int) -> PeerFailed | None:
        """The group's first failure, or a rank that left before ``step``; nothing of one's own."""
        try:
            failed = self._entry(self._KEY)
            left = self._entry(self._LEFT)
        except Exception as error:
            return PeerFailed(
                f"the group's store is gone ({error}); the process that hosted it, rank 0 or the "
                "launcher, has ended"
            )
        if failed is not None and failed["rank"] != self._rank:
            rank = failed["rank"]
            return PeerFailed(f"rank {rank} failed: {failed['message']}", rank=rank)
        if left is not None and left["rank"] != self._rank and left["step"] < step:
            return PeerFailed(
                f"rank {left['rank']} left the run after {left['step']} steps; give every rank the "
                "same number of batches",
                rank=left["rank"],
            )
        return None

    def _entry(self, key: str) -> dict[str, Any] | None:
        if not self._store.check([key]):
            return None
        entry: dict[str, Any] = json.loads(self._store.get(key))
        return entry

    def leave(self, step: int) -> None:
        """Say that this rank ended its part after ``step`` steps. Never raises."""
        try:
            self._store.compare_set(self._LEFT, "", json.dumps({"rank": self._rank, "step": step}))
        except Exception:  # nobody is left to read it
            return

    def watch_uncaught(self) -> None:
        """Post any exception that ends this process, until ``unwatch``."""
        self._previous = sys.excepthook
        sys.excepthook = self._hook

    def unwatch(self) -> None:
        """Put the previous excepthook back, unless somebody hooked after us."""
        if sys.excepthook is self._hook and self._previous is not None:
            sys.excepthook = self._previous

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.uncaught = error
        self.post(f"{kind.__name__}: {error}")
        (self._previous or sys.__excepthook__)(kind, error, trace)
