"""Sizes, ages and progress, in words for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["age", "progress", "size"]

_LINE_EVERY = 10.0
"""Seconds: the log of a job shows that something goes on, and not much more."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def size(nbytes: int | None) -> str:
    """Bytes in a unit that keeps the number short."""
    if nbytes is None:
        return "-"
    number = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def age(since: float | None) -> str:
    """Seconds that have passed."""
    if since is None:
        return "-"
    whole = max(0, int(since))
    for unit in ("d", "h", "m"):
        if whole >= 2 * _UNITS[unit]:
            return f"{whole // int(_UNITS[unit])}{unit}"
    return f"{whole}s"


@contextmanager
def progress(
    what: str, total: int, *, unit: Literal["bytes", "time"] = "bytes"
) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, now and then a line in a file or a pipe.

    Call the result with the bytes, or milliseconds, that were done since the last call.
    """
    if not sys.stderr.isatty():
        yield _Lines(what, total, unit).advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    rest = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *rest, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class _Lines:
    """Progress for who reads it later, or through a pipe: a line to standard error at times."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._next = time.monotonic() + _LINE_EVERY

    def advance(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_EVERY
        share = min(1.0, self._done / self._total) if self._total else 1.0
        more = f", {size(self._done)} of {size(self._total)}" if self._unit == "bytes" else ""
        print(f"sapwood: {self._what}: {share:.0%}{more}", file=sys.stderr)
