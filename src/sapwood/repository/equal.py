"""Merging blobs whose bytes are equal, inside a transaction of the catalog."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence

from sapwood.repository.database import one

__all__ = ["PACKED", "note_digest"]

PACKED = "COALESCE(stored, nbytes)"
"""The bytes a blob takes in its pack."""
Forget = Callable[[sqlite3.Connection, Sequence[int]], None]
"""Takes away those of some blobs that nothing refers to any more."""


def note_digest(
    db: sqlite3.Connection,
    blob: int,
    digest: bytes,
    mark: bytes,
    damaged: Collection[int],
    forget: Forget,
) -> int:
    """Note what a blob's bytes are, and merge it; bytes that has freed. See ``Catalog.hashed``."""
    row = one(db, "SELECT nbytes, pack FROM blob WHERE id = ? AND same_as IS NULL", (blob,))
    if row is None:
        return 0
    nbytes, pack = row
    query = "SELECT id FROM blob WHERE digest = ? AND nbytes = ? AND same_as IS NULL AND id != ?"
    other = one(db, query, (digest, nbytes, blob))
    if other is None or other[0] in damaged:
        change = "UPDATE blob SET digest = ?, mark = ? WHERE id = ?"
        db.execute(change, (digest, mark, blob))
        return 0 if other is None else _mend(db, other[0], blob, mark, forget)
    change = (
        "UPDATE blob SET digest = ?, mark = ?, same_as = ?, pack = NULL, start = NULL WHERE id = ?"
    )
    db.execute(change, (digest, mark, other[0], blob))
    db.execute("UPDATE blob SET refs = refs + 1 WHERE id = ?", other)
    db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
    return int(nbytes)


def _mend(db: sqlite3.Connection, damaged: int, sound: int, mark: bytes, forget: Forget) -> int:
    """Let a blob, and all that are the same as it, be the same as another one."""
    query = f"SELECT {PACKED}, pack, base FROM blob WHERE id = ?"  # noqa: S608
    nbytes, pack, base = one(db, query, (damaged,))
    # What has it as its base as well: chains of bases are followed by their own numbers.
    count = sum(
        db.execute(f"UPDATE blob SET {kind} = ? WHERE {kind} = ?", (sound, damaged)).rowcount  # noqa: S608
        for kind in ("same_as", "base")
    )
    change = (
        "UPDATE blob SET same_as = ?, mark = ?, refs = refs - ?, pack = NULL, start = NULL, "
        "stored = NULL, base = NULL WHERE id = ?"
    )
    db.execute(change, (sound, mark, count, damaged))
    db.execute("UPDATE blob SET refs = refs + ? WHERE id = ?", (count + 1, sound))
    db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
    if base is not None:
        db.execute("UPDATE blob SET refs = refs - 1 WHERE id = ?", (base,))
        forget(db, [base])
    return int(nbytes)
