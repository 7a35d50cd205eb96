"""Closing what a script forgot to close, when its process ends."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from sapwood.errors import SapwoodError

__all__ = ["AtExit"]

log = logging.getLogger(__name__)


class AtExit:
    """Calls a ``close`` method at the end of the process, and does not keep its object alive."""

    def __init__(self, close: Callable[[], object]) -> None:
        """``close`` is a bound method."""
        # One object each: atexit forgets every registration of an equal callable.
        self._call = functools.partial(_call, weakref.WeakMethod(close))
        atexit.register(self._call)

    def forget(self) -> None:
        """It is closed already."""
        atexit.unregister(self._call)


def _call(method: weakref.WeakMethod[Any]) -> None:
    close = method()
    if close is not None:
        try:
            close()
        except SapwoodError as error:
            log.error("while closing at exit: %s", error)
