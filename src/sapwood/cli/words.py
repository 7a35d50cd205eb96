"""Sizes, ages, durations and progress, in words for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from sapwood.errors import ConfigError

__all__ = ["age", "duration", "progress", "seconds", "size"]

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


def duration(value: float) -> str:
    """A length of time as a user would write it."""
    for unit in ("d", "h", "m"):
        if value >= _UNITS[unit] and value % _UNITS[unit] == 0:
            return f"{value / _UNITS[unit]:g}{unit}"
    return f"{value:g}s"


def seconds(text: str, option: str) -> float:
    """A length of time written as 90, 90s, 15m, 1h or 2d.

    Raises:
        ConfigError: it is written otherwise.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found:
        raise ConfigError(f"{option} is {text!r}, expected a time such as 90s, 15m, 1h or 2d")
    return float(found[1]) * _UNITS[found[2] or "s"]


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
