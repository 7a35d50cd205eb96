"""Knowing how a backward pass ended.

Autograd calls a queued callback when a backward pass succeeds, and drops it unseen when one fails.
The guard is that callback, and notices being dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["BackwardGuard"]


class BackwardGuard:
    """Calls ``ended`` when the backward pass under way succeeds, ``aborted`` when it fails."""

    def __init__(self, ended: Callable[[], None], aborted: Callable[[], None]) -> None:
        """Both run on the thread of the backward pass."""
        self._ended = ended
        self._aborted: Callable[[], None] | None = None
        self._on_abort = aborted

    def arm(self) -> None:
        """Call from inside a backward pass."""
        self._aborted = self._on_abort
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Autograd says the pass is over."""
        self._aborted = None
        self._ended()

    def __del__(self) -> None:
        """Autograd dropped the callback: the pass failed."""
        if self._aborted is not None:
            self._aborted()
