"""Where a repository's bytes lie: packs, the blobs in them, and which blobs are equal."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sapwood.repository.database import Database, one

__all__ = ["PACKED", "NewPack", "PackRow", "PackTable", "Place"]

PACKED = "COALESCE(stored, nbytes)"
"""The bytes a blob takes in its pack."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a blob's bytes lie."""

    blob: int
    pack: str
    start: int
    nbytes: int
    mark: bytes | None
    """Fast checksum, once there is one."""
    stored: int | None = None
    """Bytes it takes there, if it lies there as what differs from its base."""
    base: int | None = None

    @property
    def packed(self) -> int:
        """Bytes it takes in the pack."""
        return self.nbytes if self.stored is None else self.stored


@dataclass(frozen=True, kw_only=True)
class NewPack:
    """A pack that was published, and the blobs in it."""

    key: str
    nbytes: int
    blobs: Sequence[tuple[int, int]]
    """Start and size of each."""
    synced: bool = False
    """Whether it would survive a power cut."""


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack, and how much of it is in use."""

    id: int
    key: str
    nbytes: int
    live: int


class PackTable:
    """The part of a catalog that says where bytes are. Fork- and thread-safe."""

    def __init__(self, database: Database) -> None:
        """``database`` stays the caller's to close."""
        self._database = database

    @property
    def database(self) -> Database:
        """For those who change the catalog in ways of their own."""
        return self._database

    # -- what a power cut leaves ---------------------------------------------------------------

    def unsynced(self, blobs: Iterable[int]) -> list[str]:
        """The packs that these blobs need, also through others, and that a power cut could take."""
        with self._database.reading() as db:
            return self._unsynced(db, blobs)

    def synced(self, packs: Iterable[str]) -> None:
        """Note that packs would survive a power cut."""
        with self._database.writing() as db:
            change = "UPDATE pack SET synced = 1 WHERE key = ?"
            db.executemany(change, [(key,) for key in packs])

    def _unsynced(self, db: sqlite3.Connection, blobs: Iterable[int]) -> list[str]:
        query = (
            "WITH RECURSIVE needed(id) AS (SELECT value FROM json_each(?) UNION"
            " SELECT same_as FROM blob JOIN needed USING (id) WHERE same_as IS NOT NULL UNION"
            " SELECT base FROM blob JOIN needed USING (id) WHERE base IS NOT NULL) "
            "SELECT DISTINCT pack.key FROM needed JOIN blob USING (id) "
            "JOIN pack ON pack.id = blob.pack WHERE NOT pack.synced"
        )
        rows = db.execute(query, (json.dumps(sorted(set(blobs))),))
        return [key for (key,) in rows]

    # -- equal tensors -------------------------------------------------------------------------

    def unhashed(self, limit: int = 1000) -> list[Place]:
        """Blobs whose bytes nobody has hashed yet, those that lie together in order."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE digest IS NULL AND blob.nbytes > 0 "
            "ORDER BY blob.id LIMIT ?"
        )
        with self._database.reading() as db:
            return [Place(*row) for row in db.execute(query, (limit,))]

    def twins(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        """Where the bytes lie that others with these digests would be merged into."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark, stored, base FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE digest = ? AND same_as IS NULL"
        )
        found = {}
        with self._database.reading() as db:
            for digest in digests:
                row = one(db, query, (digest,))
                if row is not None:
                    found[digest] = Place(*row)
        return found

    def hashed(
        self, found: Sequence[tuple[int, bytes, bytes]], damaged: Collection[int] = ()
    ) -> list[str]:
        """Note the digests and fast checksums of blobs, and merge those that are equal.

        A blob that was removed meanwhile is passed over. Those that are ``damaged`` are merged into
        what is equal to them, so that they are sound again. What would survive a power cut is not
        merged into what would not: the packs are returned that must be synced before.
        """
        packs: dict[str, None] = {}
        with self._database.writing() as db:
            for blob, digest, mark in found:
                packs.update(dict.fromkeys(self._note_digest(db, blob, digest, mark, damaged)))
        return list(packs)

    def _note_digest(
        self,
        db: sqlite3.Connection,
        blob: int,
        digest: bytes,
        mark: bytes,
        damaged: Collection[int],
    ) -> list[str]:
        query = (
            "SELECT blob.nbytes, pack.id, synced FROM blob JOIN pack ON pack.id = blob.pack "
            "WHERE blob.id = ? AND same_as IS NULL"
        )
        row = one(db, query, (blob,))
        if row is None:
            return []
        nbytes, pack, synced = row
        query = (
            "SELECT id FROM blob WHERE digest = ? AND nbytes = ? AND same_as IS NULL AND id != ?"
        )
        other = one(db, query, (digest, nbytes, blob))
        if other is None:
            change = "UPDATE blob SET digest = ?, mark = ? WHERE id = ?"
            db.execute(change, (digest, mark, blob))
            return []
        if other[0] in damaged:
            return self._mend(db, other[0], blob, digest, mark)
        if synced and (packs := self._unsynced(db, other)):
            return packs
        change = (
            "UPDATE blob SET digest = ?, mark = ?, same_as = ?, pack = NULL, start = NULL "
            "WHERE id = ?"
        )
        db.execute(change, (digest, mark, other[0], blob))
        db.execute("UPDATE blob SET refs = refs + 1 WHERE id = ?", other)
        db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
        return []

    def _mend(
        self, db: sqlite3.Connection, damaged: int, sound: int, digest: bytes, mark: bytes
    ) -> list[str]:
        """Let a blob, and all that are the same as it, be the same as another one.

        Nothing is done yet if packs are returned that must be synced before.
        """
        query = (
            "SELECT COALESCE(stored, blob.nbytes), pack.id, synced, base FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE blob.id = ?"
        )
        nbytes, pack, synced, base = one(db, query, (damaged,))
        if synced and (packs := self._unsynced(db, [sound])):
            return packs
        db.execute("UPDATE blob SET digest = ?, mark = ? WHERE id = ?", (digest, mark, sound))
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
            self._forget(db, [base])
        return []

    # -- packs ---------------------------------------------------------------------------------

    def strangers(self, keys: Iterable[str], remove: Callable[[Sequence[str]], None]) -> set[str]:
        """Let those keys be removed that are no packs of this catalog; which.

        In one transaction: a writer whose pack is among them has said so before, and keeps it, or
        finds out when it wants to.
        """
        with self._database.writing() as db:
            known = {row[0] for row in db.execute("SELECT key FROM pack")}
            found = set(keys) - known
            if found:
                remove(sorted(found))
            return found

    def packs(self) -> list[PackRow]:
        """All packs, oldest first."""
        with self._database.reading() as db:
            rows = db.execute("SELECT id, key, nbytes, live FROM pack ORDER BY id")
            return [PackRow(*row) for row in rows]

    def blobs_in(self, pack: int) -> list[Place]:
        """The blobs that lie in a pack, in order."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark, stored, base FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE pack.id = ? ORDER BY start"
        )
        with self._database.reading() as db:
            return [Place(*row) for row in db.execute(query, (pack,))]

    def blobs(self) -> list[tuple[Place, bytes | None]]:
        """Every run of bytes that is kept, with its digest where there is one, as they lie."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark, stored, base, digest FROM blob "
            "JOIN pack ON pack.id = blob.pack ORDER BY pack.id, start"
        )
        with self._database.reading() as db:
            return [(Place(*row[:-1]), row[-1]) for row in db.execute(query)]

    def miscounted(self, references: Mapping[int, int]) -> list[str]:
        """Where counts are not what they should be, a line each; ``references`` of manifests."""
        problems = []
        with self._database.reading() as db:
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

    def drop_dead_packs(self) -> list[PackRow]:
        """Forget the packs in which nothing is in use; their objects are the caller's to remove.

        A power cut does not undo that: versions whose packs are gone would come back.
        """
        with self._database.writing(synced=True) as db:
            rows = db.execute("SELECT id, key, nbytes, live FROM pack WHERE live = 0").fetchall()
            db.executemany("DELETE FROM pack WHERE id = ?", [(row[0],) for row in rows])
            return [PackRow(*row) for row in rows]

    def move(
        self,
        old: int,
        pack: NewPack,
        starts: Mapping[int, int],
        check: Callable[[], object] = lambda: None,
    ) -> bool:
        """Note that the blobs of a pack lie in a new one; False if all were removed meanwhile.

        ``check`` as in ``add``.
        """
        with self._database.writing() as db:
            check()
            mine = {row[0] for row in db.execute("SELECT id FROM blob WHERE pack = ?", (old,))}
            moving = mine & starts.keys()
            if not moving:
                return False
            size = (
                f"SELECT sum({PACKED}) FROM blob "  # noqa: S608
                "WHERE id IN (SELECT value FROM json_each(?))"
            )
            live = one(db, size, (json.dumps(sorted(moving)),))[0]
            insert = "INSERT INTO pack (key, nbytes, live, synced) VALUES (?, ?, ?, ?)"
            new = db.execute(insert, (pack.key, pack.nbytes, live, pack.synced)).lastrowid
            db.executemany(
                "UPDATE blob SET pack = ?, start = ? WHERE id = ?",
                [(new, starts[blob], blob) for blob in sorted(moving)],
            )
            db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (live, old))
            return True

    def _add_pack(self, db: sqlite3.Connection, pack: NewPack, refs: Mapping[int, int]) -> int:
        """The number of the first of its blobs; the others follow. ``refs`` are by their places."""
        live = sum(nbytes for _, nbytes in pack.blobs)
        cursor = db.execute(
            "INSERT INTO pack (key, nbytes, live, synced) VALUES (?, ?, ?, ?)",
            (pack.key, pack.nbytes, live, pack.synced),
        )
        id = cursor.lastrowid
        # As SQLite would number them, which never gives a number twice.
        last = one(db, "SELECT seq FROM sqlite_sequence WHERE name = 'blob'")
        first = 1 + (0 if last is None else int(last[0]))
        db.executemany(
            "INSERT INTO blob (id, nbytes, pack, start, refs) VALUES (?, ?, ?, ?, ?)",
            [
                (first + at, nbytes, id, start, refs.get(at, 0))
                for at, (start, nbytes) in enumerate(pack.blobs)
            ],
        )
        return first

    def _forget(self, db: sqlite3.Connection, blobs: Sequence[int]) -> None:
        for blob in blobs:
            query = f"SELECT refs, pack, {PACKED}, same_as, base FROM blob WHERE id = ?"  # noqa: S608
            row = one(db, query, (blob,))
            # It may be gone already, with one of these that was the same as it or had it as base.
            if row is None or row[0] > 0:
                continue
            _, pack, nbytes, same_as, base = row
            db.execute("DELETE FROM blob WHERE id = ?", (blob,))
            if same_as is None:
                db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
            for other in (same_as, base):
                if other is not None:
                    db.execute("UPDATE blob SET refs = refs - 1 WHERE id = ?", (other,))
                    self._forget(db, [other])
