"""What a converted database says of itself."""

from __future__ import annotations

import json
import os
from typing import Any

from sapwood.data.index import build_index, list_databases
from sapwood.data.pagefile import open_pages
from sapwood.data.write.base import ABOUT
from sapwood.errors import DataError

__all__ = ["KEY", "VERSION", "pack", "read_about"]

KEY = b"about"
VERSION = 1


def pack(facts: dict[str, Any]) -> bytes:
    """As it is stored."""
    return json.dumps({"version": VERSION, **facts}).encode()


def read_about(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What ``convert`` noted: kind, records, columns with dtype and shape, classes.

    A database that comes from elsewhere has nothing of that, and gives None.

    Raises:
        DataError: the database, or the note, is damaged.
    """
    if ABOUT.encode() not in list_databases(path):
        return None
    index = build_index(path, ABOUT)
    with open_pages(path) as file:
        if len(index) != 1 or file.fingerprint != index.fingerprint:
            raise DataError(f"expected one record in the database {ABOUT!r}")
        raw = file.read(int(index.offsets[0]), int(index.lengths[0]))
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise DataError(f"{ABOUT!r} holds no JSON: {error}") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise DataError(f"{ABOUT!r}: expected version {VERSION}; use a newer Sapwood")
    return found
