"""Sizes, ages and progress, in words for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["age", "progress", "size"]

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
    """A bar on a terminal, nothing in a pipe; call the result with bytes, or milliseconds, done."""
    if not sys.stderr.isatty():
        yield lambda done: None
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
