"""Whether a catalog's counts of references and of bytes in use are right."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping

from sapwood.repository.equal import PACKED

__all__ = ["miscounted"]


def miscounted(db: sqlite3.Connection, references: Mapping[int, int]) -> list[str]:
    """See ``Catalog.miscounted``."""
    problems = []
    same = Counter(
        row[0] for row in db.execute("SELECT same_as FROM blob WHERE same_as IS NOT NULL")
    )
    query = "SELECT base FROM blob WHERE base IS NOT NULL"
    bases = Counter(row[0] for row in db.execute(query))
    for blob, refs in db.execute("SELECT id, refs FROM blob").fetchall():
        expected = references.get(blob, 0) + same[blob] + bases[blob]
        if refs != expected:
            problems.append(f"blob {blob} is counted {refs} times, used {expected} times")
    live = Counter[int]()
    query = f"SELECT pack, {PACKED} FROM blob WHERE pack NOT NULL"  # noqa: S608
    for pack, nbytes in db.execute(query):
        live[pack] += nbytes
    for pack, key, counted in db.execute("SELECT id, key, live FROM pack").fetchall():
        if counted != live[pack]:
            problems.append(f"pack {key}: {counted} bytes counted, {live[pack]} in use")
    return problems
