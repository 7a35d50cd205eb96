"""Writing for people: tables and text that are sane in a terminal, a pipe and a log file."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["console", "print_json", "table", "width"]

_PIPE_WIDTH = 160


def width() -> int:
    """Columns to draw in: those of the terminal, or enough for a file."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def console() -> Console:
    """A console on standard output; a pipe gets wide lines, no colours and no wrapping at 80."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_PIPE_WIDTH, color_system=None)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table with these column headings; those in ``right`` hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


def print_json(value: Any) -> None:
    """Write one JSON document for programs."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
