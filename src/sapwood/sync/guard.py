"""Knowing how a backward pass ended.

Autograd calls a queued callback when a backward pass succeeds, and drops it unseen when one fails.
The guard is that callback, and notices being dropped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd import graph

from sapwood.errors import UsageError
from sapwood.sync import refusals

__all__ = ["BackwardGuard", "in_backward", "nested"]

_RUN_BACKWARD = graph._engine_run_backward.__code__


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def nested() -> bool:
    """Whether the backward pass under way was started by another one (re-entrant checkpointing).

    Autograd's callbacks belong to the innermost pass, and it has no name for the outer one; but
    each pass has a frame on the stack of the thread that started it. A device's own thread starts
    with none, so there one frame is a nested pass.
    """
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    outermost = 0 if isinstance(threading.current_thread(), threading._DummyThread) else 1
    return depth > outermost


def _is_compiled() -> bool:
    """Whether compiled autograd runs, or traces, the backward pass under way."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(
        module.compiled_autograd_enabled or module.in_compiled_autograd_region
    )


class BackwardGuard:
    """Calls ``ended`` when the backward pass under way succeeds, ``aborted`` when it fails."""

    # Of the class: a tracer of Python code makes objects without calling ``__init__``.
    _aborted: Callable[[], None] | None = None

    def __init__(self, ended: Callable[[], None], aborted: Callable[[], None]) -> None:
        """Both run on the thread of the backward pass."""
        self._ended = ended
        self._on_abort = aborted

    def arm(self) -> None:
        """Call from inside a backward pass.

        Raises:
            UsageError: it is compiled, and so has neither callbacks nor hooks at their time.
        """
        if _is_compiled():
            raise UsageError(refusals.COMPILED_AUTOGRAD)
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
