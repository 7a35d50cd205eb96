"""Writing for people: tables and text that are sane in a terminal, a pipe and a log file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "print_json", "print_with_messages", "table", "width"]

_PIPE_WIDTH = 100
_ENDLESS = 100_000
_READABLE = 24
"""Columns below which a shortened message says nothing."""


def width() -> int:
    """Columns to draw in: ``COLUMNS``, those of the terminal, or enough for a file."""
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if _limited() else _PIPE_WIDTH


def console() -> Console:
    """A console on standard output; a pipe gets whole lines and no colours."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    # A program that reads a table must not find its cells cut.
    columns = width() if _limited() else _ENDLESS
    return Console(highlight=False, width=columns, color_system=None)


def _limited() -> bool:
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table with these column headings; those in ``right`` hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


def print_with_messages(made: Table) -> None:
    """Print a table whose last column holds messages: only these are shortened, to one line each.

    Columns that do not fit even so run over the edge, where the terminal wraps them.
    """
    messages = made.columns[-1]
    # Rich narrows columns that may wrap before it cuts others.
    messages.no_wrap, messages.overflow = False, "ellipsis"
    out = console()
    wanted = out.measure(made, options=out.options.update(width=_ENDLESS)).maximum
    cells = [cell for cell in messages.cells if isinstance(cell, Text)]
    for cell in cells:
        cell.no_wrap = True
    longest = max((cell.cell_len for cell in cells), default=0)
    out.width = max(out.width, wanted - max(longest - _READABLE, 0))
    out.print(made, soft_wrap=False, crop=False)


def print_json(value: Any) -> None:
    """Write one JSON document for programs."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
