"""Which blobs may become what differs from which, and telling the catalog that they have.

A blob that is a base, or becomes one, has a digest, so that it is never merged into another; no
chain of bases leads back to its beginning, and none is longer than what was set.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sapwood.repository.catalog import Catalog, NewPack, Place
from sapwood.repository.database import one

__all__ = ["BlobPair", "ColdBlob", "cool_blobs", "pairs_worth"]

_LEAST = 4096
"""Tensors of fewer bytes stay as they are."""
_UP = """
WITH RECURSIVE up(id, depth) AS (
    SELECT ?, 0 UNION ALL
    SELECT blob.base, depth + 1 FROM up JOIN blob ON blob.id = up.id WHERE blob.base IS NOT NULL
) SELECT id, depth FROM up
"""
_DOWN = """
WITH RECURSIVE down(id, depth) AS (
    SELECT ?, 0 UNION ALL
    SELECT blob.id, depth + 1 FROM down JOIN blob ON blob.base = down.id
) SELECT max(depth) FROM down
"""


@dataclass(frozen=True, slots=True)
class BlobPair:
    """A tensor's blob, and that of the tensor it comes from."""

    blob: int
    base: int
    itemsize: int
    nbytes: int = 0
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ColdBlob:
    """A blob whose cold form was written."""

    place: Place
    """Where its plain form is."""
    start: int
    """Of the cold form in its pack."""
    stored: int
    base: int

    def place_in(self, key: str) -> Place:
        """Where its cold form is."""
        return replace(self.place, pack=key, start=self.start, stored=self.stored, base=self.base)


def pairs_worth(catalog: Catalog, pairs: Sequence[BlobPair], chain: int) -> list[BlobPair]:
    """The pairs that can be cooled, each blob once, with what the catalog knows of them."""
    found: dict[int, BlobPair] = {}
    with catalog.database.reading() as db:
        facts = _facts(db, {blob for pair in pairs for blob in (pair.blob, pair.base)})
        for pair in pairs:
            blob, base = facts.get(pair.blob), facts.get(pair.base)
            if blob is None or base is None or blob[0] == base[0] or blob[0] in found:
                continue
            (id, nbytes, digest, cold), (base_id, base_nbytes, base_digest, _) = blob, base
            fits = nbytes == base_nbytes and nbytes >= _LEAST and cold is None
            if not fits or digest is None or base_digest is None:
                continue
            if _allowed(db, id, base_id, chain):
                found[id] = BlobPair(id, base_id, pair.itemsize, nbytes, digest)
    return list(found.values())


def _facts(
    db: sqlite3.Connection, blobs: Iterable[int]
) -> dict[int, tuple[int, int, bytes | None, int | None]]:
    """By blob: the one that stands for all equal ones, its size, digest and base."""
    query = (
        "SELECT blob.id, at.id, at.nbytes, at.digest, at.base FROM blob "
        "JOIN blob AS at ON at.id = COALESCE(blob.same_as, blob.id) "
        "WHERE blob.id IN (SELECT value FROM json_each(?))"
    )
    rows = db.execute(query, (json.dumps(sorted(blobs)),))
    return {row[0]: (row[1], row[2], row[3], row[4]) for row in rows}


def _allowed(db: sqlite3.Connection, blob: int, base: int, chain: int) -> bool:
    """Whether a blob may get this base: no circle, and no chain that is too long."""
    above = db.execute(_UP, (base,)).fetchall()
    if any(id == blob for id, _ in above):
        return False
    below = one(db, _DOWN, (blob,))[0]
    return int(max(depth for _, depth in above)) + 1 + int(below) <= chain


def cool_blobs(
    catalog: Catalog,
    pack: NewPack,
    blobs: Sequence[ColdBlob],
    chain: int,
    check: Callable[[], object] = lambda: None,
) -> list[ColdBlob]:
    """Say that blobs are in cold form in a new pack; those that are still as they were.

    Others were removed, moved, or cooled by somebody else meanwhile; they stay as they are.
    """
    done = []
    with catalog.database.writing(synced=True) as db:
        check()  # as in ``Catalog.add``
        insert = "INSERT INTO pack (key, nbytes, live, synced) VALUES (?, ?, 0, ?)"
        new = db.execute(insert, (pack.key, pack.nbytes, pack.synced)).lastrowid
        for each in blobs:
            if _cool(db, each, int(new or 0), chain):
                done.append(each)
        if done:
            live = sum(each.stored for each in done)
            db.execute("UPDATE pack SET live = ? WHERE id = ?", (live, new))
        else:
            db.execute("DELETE FROM pack WHERE id = ?", (new,))
    return done


def _cool(db: sqlite3.Connection, each: ColdBlob, new: int, chain: int) -> bool:
    place = each.place
    query = (
        "SELECT pack.id FROM blob JOIN pack ON pack.id = blob.pack "
        "WHERE blob.id = ? AND pack.key = ? AND start = ? AND base IS NULL AND same_as IS NULL"
    )
    old = one(db, query, (place.blob, place.pack, place.start))
    base = one(db, "SELECT 1 FROM blob WHERE id = ? AND same_as IS NULL", (each.base,))
    if old is None or base is None or not _allowed(db, place.blob, each.base, chain):
        return False
    change = "UPDATE blob SET pack = ?, start = ?, stored = ?, base = ? WHERE id = ?"
    db.execute(change, (new, each.start, each.stored, each.base, place.blob))
    db.execute("UPDATE blob SET refs = refs + 1 WHERE id = ?", (each.base,))
    db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (place.nbytes, old[0]))
    return True
