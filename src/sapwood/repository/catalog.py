"""What is in a repository: models, tags, metrics, lineage, and where each tensor's bytes lie.

References are counted and manifests come in one transaction, so that neither can be without the
other, whoever is killed when.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sapwood.errors import Damaged, Gone, ModelExists, ModelNotFound
from sapwood.repository.base import NOTHING, Kin, ModelRecord, NewModel
from sapwood.repository.database import Database, one
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import (
    HIDDEN,
    Reference,
    is_hidden,
    nearest,
    new_id,
    next_version,
    time_of,
)

__all__ = ["Catalog", "NewPack", "PackRow", "Place"]


_VARIABLES = 10_000
"""In one statement; SQLite takes three times as many."""
_KIN = "SELECT model, COUNT(*), SUM(nbytes) FROM layer WHERE id IN ({}) GROUP BY model"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a blob's bytes lie."""

    blob: int
    pack: str
    start: int
    nbytes: int
    mark: bytes | None
    """Fast checksum, once there is one."""


@dataclass(frozen=True, kw_only=True)
class NewPack:
    """A pack that was published, and the blobs in it."""

    key: str
    nbytes: int
    blobs: Sequence[tuple[int, int]]
    """Start and size of each."""


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack, and how much of it is in use."""

    id: int
    key: str
    nbytes: int
    live: int


class Catalog:
    """The tables of one repository. Fork- and thread-safe; owned by the repository."""

    def __init__(self, database: Database) -> None:
        """``database`` stays the caller's to close."""
        self._database = database

    # -- looking -----------------------------------------------------------------------------

    def find(self, reference: Reference) -> ModelRecord:
        """A model version; a tag stands for a version, and no version for the latest one.

        Raises:
            ModelNotFound: there is none; says which ones are alike.
        """
        with self._database.reading() as db:
            return self._record(db, self._find(db, reference))

    def manifest(self, reference: Reference) -> tuple[ModelRecord, Manifest]:
        """The same, with its tensors."""
        with self._database.reading() as db:
            row = self._find(db, reference)
            return self._record(db, row), Manifest.decode(row["manifest"])

    def exists(self, name: str, version: str) -> bool:
        """Whether there is such a version."""
        query = "SELECT 1 FROM model WHERE name = ? AND version = ? AND removed IS NULL"
        with self._database.reading() as db:
            return one(db, query, (name, version)) is not None

    def models(self, pattern: str = "*") -> list[ModelRecord]:
        """Every version of every model whose name fits, by name, oldest version first.

        Hidden ones only fit a pattern that is hidden, too.
        """
        query = (
            "SELECT * FROM model WHERE removed IS NULL AND name GLOB ? "
            "AND (name GLOB ?) = ? ORDER BY name, id"
        )
        values = (pattern, f"{HIDDEN}*", is_hidden(pattern))
        with self._database.reading() as db:
            return [self._record(db, row) for row in _rows(db).execute(query, values)]

    def by_id(self, id: int, name: str) -> ModelRecord:
        """A version of a model, also one that was removed.

        Raises:
            ModelNotFound: there never was.
        """
        query = "SELECT * FROM model WHERE id = ? AND name = ?"
        with self._database.reading() as db:
            row = _rows(db).execute(query, (id, name)).fetchone()
            if row is None:
                raise ModelNotFound(f"{name!r} has no version of number {id}")
            return self._record(db, row)

    def children(self, id: int) -> list[ModelRecord]:
        """What was saved with this version as its parent, also what was removed."""
        with self._database.reading() as db:
            query = "SELECT * FROM model WHERE parent = ? ORDER BY id"
            return [self._record(db, row) for row in _rows(db).execute(query, (id,))]

    def places(self, blobs: Iterable[int]) -> dict[int, Place]:
        """Where blobs lie now; gc may move them, so a place is not kept for long.

        Raises:
            Gone: one was removed.
        """
        wanted = sorted({blob for blob in blobs if blob != NOTHING})
        found: dict[int, Place] = {}
        query = (
            "SELECT blob.id, pack.key, at.start, at.nbytes, at.mark FROM blob "
            "JOIN blob AS at ON at.id = COALESCE(blob.same_as, blob.id) "
            "JOIN pack ON pack.id = at.pack WHERE blob.id IN (SELECT value FROM json_each(?))"
        )
        with self._database.reading() as db:
            for row in db.execute(query, (json.dumps(wanted),)):
                found[row[0]] = Place(*row)
        missing = [blob for blob in wanted if blob not in found]
        if missing:
            raise Gone(f"blob {missing[0]} was removed")
        return found

    def canonical(self, blobs: Iterable[int]) -> dict[int, int | None]:
        """For each blob the one that stands for all equal ones; None where nobody hashed it yet."""
        wanted = json.dumps(sorted({blob for blob in blobs if blob != NOTHING}))
        # A blob is merged when it is hashed, and only then: from that moment this is settled.
        query = (
            "SELECT id, CASE WHEN digest IS NULL THEN NULL ELSE COALESCE(same_as, id) END "
            "FROM blob WHERE id IN (SELECT value FROM json_each(?))"
        )
        with self._database.reading() as db:
            return dict(db.execute(query, (wanted,)).fetchall())

    # -- architectures -----------------------------------------------------------------------

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> list[Kin]:
        """The versions with most bytes in these layers; of equals, the best by a metric."""
        found: dict[int, tuple[int, int]] = {}
        with self._database.reading() as db:
            for start in range(0, len(layers), _VARIABLES):
                some = layers[start : start + _VARIABLES]
                for id, count, nbytes in db.execute(_KIN.format(",".join("?" * len(some))), some):
                    before = found.get(id, (0, 0))
                    found[id] = (before[0] + count, before[1] + nbytes)
            query = "SELECT * FROM model WHERE id = ? AND removed IS NULL AND name GLOB ?"
            known: list[Kin] = []
            ranked = sorted(found.items(), key=lambda one: (-one[1][1], -one[1][0], -one[0]))
            for id, (count, nbytes) in ranked:
                # Behind the last place, only one that is as good can come before by metric.
                if len(known) >= limit and nbytes < known[-1].nbytes:
                    break
                row = _rows(db).execute(query, (id, pattern)).fetchone()
                if row is not None:
                    known.append(Kin(record=self._record(db, row), layers=count, nbytes=nbytes))
        sign = 1.0 if lower else -1.0
        worst = float("inf")

        def place(one: Kin) -> tuple[int, int, float, int]:
            value = one.record.metrics.get(by) if by is not None else None
            metric = worst if value is None else sign * value
            return -one.nbytes, -one.layers, metric, -one.record.id

        return sorted(known, key=place)[:limit]

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """Configurations of layers, in that order.

        Raises:
            Damaged: one is not there.
        """
        with self._database.reading() as db:
            query = "SELECT data FROM config WHERE digest = ?"
            rows = [one(db, query, (digest,)) for digest in digests]
        if None in rows:
            raise Damaged("the catalog lacks a configuration that a model's graph refers to")
        return [row[0] for row in rows]

    # -- adding ------------------------------------------------------------------------------

    def add(self, model: NewModel, pack: NewPack | None, *, synced: bool = False) -> ModelRecord:
        """Make a version be there, with all it refers to.

        Raises:
            ModelExists: it is there.
            Gone: something it was to share with others was removed.
        """
        with self._database.writing(synced=synced) as db:
            blobs = model.manifest.blobs
            shared = blobs
            if pack is not None:
                counts = Counter(-2 - blob for blob in blobs if blob < NOTHING)
                first = self._add_pack(db, pack, counts)
                shared = tuple(blob for blob in blobs if blob >= NOTHING)
                blobs = tuple(b if b >= NOTHING else first - 2 - b for b in blobs)
            self._refer(db, shared, +1)
            return self._add(db, model.with_blobs(blobs))

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """Make a tag point to a version; it moves if it pointed to another one."""
        with self._database.writing() as db:
            row = self._find(db, reference)
            self._tag(db, row["name"], tag, row["id"])
            return self._record(db, row)

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag.

        Raises:
            ModelNotFound: there is none.
        """
        with self._database.writing() as db:
            gone = db.execute("DELETE FROM tag WHERE name = ? AND tag = ?", (name, tag)).rowcount
            if not gone:
                raise ModelNotFound(f"{name} has no tag {tag!r}")

    # -- equal tensors -----------------------------------------------------------------------

    def unhashed(self, limit: int = 1000) -> list[Place]:
        """Blobs whose bytes nobody has hashed yet, those that lie together in order."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE digest IS NULL AND blob.nbytes > 0 "
            "ORDER BY blob.id LIMIT ?"
        )
        with self._database.reading() as db:
            return [Place(*row) for row in db.execute(query, (limit,))]

    def hashed(self, found: Sequence[tuple[int, bytes, bytes]]) -> int:
        """Note the digests and fast checksums of blobs, and merge those that are equal.

        How many bytes that has freed. A blob that was removed meanwhile is passed over.
        """
        freed = 0
        with self._database.writing() as db:
            for blob, digest, mark in found:
                freed += self._note_digest(db, blob, digest, mark)
        return freed

    def _note_digest(self, db: sqlite3.Connection, blob: int, digest: bytes, mark: bytes) -> int:
        row = one(db, "SELECT nbytes, pack FROM blob WHERE id = ? AND same_as IS NULL", (blob,))
        if row is None:
            return 0
        nbytes, pack = row
        query = (
            "SELECT id FROM blob WHERE digest = ? AND nbytes = ? AND same_as IS NULL AND id != ?"
        )
        other = one(db, query, (digest, nbytes, blob))
        if other is None:
            change = "UPDATE blob SET digest = ?, mark = ? WHERE id = ?"
            db.execute(change, (digest, mark, blob))
            return 0
        change = (
            "UPDATE blob SET digest = ?, mark = ?, same_as = ?, pack = NULL, start = NULL "
            "WHERE id = ?"
        )
        db.execute(change, (digest, mark, other[0], blob))
        db.execute("UPDATE blob SET refs = refs + 1 WHERE id = ?", other)
        db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
        return int(nbytes)

    # -- packs -------------------------------------------------------------------------------

    def packs(self) -> list[PackRow]:
        """All packs, oldest first."""
        with self._database.reading() as db:
            rows = db.execute("SELECT id, key, nbytes, live FROM pack ORDER BY id")
            return [PackRow(*row) for row in rows]

    def blobs_in(self, pack: int) -> list[Place]:
        """The blobs that lie in a pack, in order."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark FROM blob "
            "JOIN pack ON pack.id = blob.pack WHERE pack.id = ? ORDER BY start"
        )
        with self._database.reading() as db:
            return [Place(*row) for row in db.execute(query, (pack,))]

    def blobs(self) -> list[tuple[Place, bytes | None]]:
        """Every run of bytes that is kept, with its digest where there is one, as they lie."""
        query = (
            "SELECT blob.id, pack.key, start, blob.nbytes, mark, digest FROM blob "
            "JOIN pack ON pack.id = blob.pack ORDER BY pack.id, start"
        )
        with self._database.reading() as db:
            return [(Place(*row[:5]), row[5]) for row in db.execute(query)]

    def miscounted(self, references: Mapping[int, int]) -> list[str]:
        """Where counts are not what they should be, a line each; ``references`` of manifests."""
        problems = []
        with self._database.reading() as db:
            same = Counter(
                row[0] for row in db.execute("SELECT same_as FROM blob WHERE same_as IS NOT NULL")
            )
            for blob, refs in db.execute("SELECT id, refs FROM blob").fetchall():
                expected = references.get(blob, 0) + same[blob]
                if refs != expected:
                    problems.append(f"blob {blob} is counted {refs} times, used {expected} times")
            live = Counter[int]()
            for pack, nbytes in db.execute("SELECT pack, nbytes FROM blob WHERE pack NOT NULL"):
                live[pack] += nbytes
            for pack, key, counted in db.execute("SELECT id, key, live FROM pack").fetchall():
                if counted != live[pack]:
                    problems.append(f"pack {key}: {counted} bytes counted, {live[pack]} in use")
        return problems

    def drop_dead_packs(self) -> list[PackRow]:
        """Forget the packs in which nothing is in use; their objects are the caller's to remove."""
        with self._database.writing() as db:
            rows = db.execute("SELECT id, key, nbytes, live FROM pack WHERE live = 0").fetchall()
            db.executemany("DELETE FROM pack WHERE id = ?", [(row[0],) for row in rows])
            return [PackRow(*row) for row in rows]

    def move(self, old: int, key: str, nbytes: int, starts: Mapping[int, int]) -> bool:
        """Note that the blobs of a pack lie in a new one; False if all were removed meanwhile."""
        with self._database.writing() as db:
            mine = {row[0] for row in db.execute("SELECT id FROM blob WHERE pack = ?", (old,))}
            moving = mine & starts.keys()
            if not moving:
                return False
            size = "SELECT sum(nbytes) FROM blob WHERE id IN (SELECT value FROM json_each(?))"
            live = one(db, size, (json.dumps(sorted(moving)),))[0]
            insert = "INSERT INTO pack (key, nbytes, live) VALUES (?, ?, ?)"
            new = db.execute(insert, (key, nbytes, live)).lastrowid
            db.executemany(
                "UPDATE blob SET pack = ?, start = ? WHERE id = ?",
                [(new, starts[blob], blob) for blob in sorted(moving)],
            )
            db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (live, old))
            return True

    def remove(self, reference: Reference) -> ModelRecord:
        """Take a version away; what it was remains in the lineage of others.

        Raises:
            ModelNotFound: there is none.
        """
        with self._database.writing() as db:
            row = self._find(db, reference)
            record = self._record(db, row)
            self._refer(db, Manifest.decode(row["manifest"]).blobs, -1)
            for table in ("tag", "layer"):
                db.execute(f"DELETE FROM {table} WHERE model = ?", (record.id,))  # noqa: S608
            db.execute(
                "UPDATE model SET removed = ?, manifest = NULL WHERE id = ?",
                (time.time(), record.id),
            )
            return record

    def layers(self, id: int) -> dict[bytes, int]:
        """Bytes of each layer of a version, by the layer's id."""
        with self._database.reading() as db:
            return dict(db.execute("SELECT id, nbytes FROM layer WHERE model = ?", (id,)))

    def forget(self, id: int) -> None:
        """Take away a version that another catalog has, and that it was there."""
        with self._database.writing() as db:
            query = "SELECT manifest FROM model WHERE id = ? AND removed IS NULL"
            row = one(db, query, (id,))
            if row is None:
                return
            self._refer(db, Manifest.decode(row[0]).blobs, -1)
            for table in ("tag", "layer", "metric"):
                db.execute(f"DELETE FROM {table} WHERE model = ?", (id,))  # noqa: S608
            db.execute("DELETE FROM model WHERE id = ?", (id,))

    # -- inside a transaction ----------------------------------------------------------------

    def _add(self, db: sqlite3.Connection, model: NewModel) -> ModelRecord:
        """Insert a version whose blobs are there and counted."""
        version = self._free_version(db, model)
        id, created = model.id, time.time()
        if id is None:
            id = new_id(one(db, "SELECT coalesce(max(id), 0) FROM model")[0])
        else:
            created = time_of(id)  # the same in every catalog that has it, now or later
        db.execute(
            "INSERT INTO model (id, name, version, created, parent, parent_name, nbytes, tensors,"
            " manifest, note) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                id,
                model.name,
                version,
                created,
                model.parent,
                model.parent_name,
                model.manifest.nbytes,
                len(model.manifest.names),
                model.manifest.encode(),
                json.dumps(dict(model.note)),
            ),
        )
        db.executemany(
            "INSERT INTO metric VALUES (?, ?, ?)",
            [(id, key, float(value)) for key, value in model.metrics.items()],
        )
        db.executemany(
            "INSERT INTO layer VALUES (?, ?, ?)",
            [(layer, id, nbytes) for layer, nbytes in model.layers.items()],
        )
        db.executemany("INSERT OR IGNORE INTO config VALUES (?, ?)", model.configs.items())
        for tag in model.tags:
            self._tag(db, model.name, tag, id)
        row = _rows(db).execute("SELECT * FROM model WHERE id = ?", (id,)).fetchone()
        return self._record(db, row)

    def _find(self, db: sqlite3.Connection, reference: Reference) -> sqlite3.Row:
        name, version = reference.name, reference.version
        alive = "SELECT * FROM model WHERE removed IS NULL AND name = ?"
        tagged = (
            "SELECT model.* FROM tag JOIN model ON model.id = tag.model "
            "WHERE tag.name = ? AND tag.tag = ?"
        )
        row: sqlite3.Row | None
        if version is None:
            latest = f"{alive} ORDER BY id DESC LIMIT 1"
            row = _rows(db).execute(latest, (name,)).fetchone()
        else:
            row = _rows(db).execute(f"{alive} AND version = ?", (name, version)).fetchone()
            row = row or _rows(db).execute(tagged, (name, version)).fetchone()
        if row is None:
            raise self._not_found(db, reference)
        return row

    def _not_found(self, db: sqlite3.Connection, reference: Reference) -> ModelNotFound:
        name, version = reference.name, reference.version
        versions = "SELECT version FROM model WHERE removed IS NULL AND name = ?"
        known = [row[0] for row in db.execute(versions, (name,))]
        if known:
            known += [row[0] for row in db.execute("SELECT tag FROM tag WHERE name = ?", (name,))]
            like = nearest(str(version), known)
            return ModelNotFound(f"{name} has no version or tag {version!r}{like}")
        every = "SELECT DISTINCT name FROM model WHERE removed IS NULL"
        names = [row[0] for row in db.execute(every) if not is_hidden(row[0])]
        return ModelNotFound(f"there is no model {name!r}{nearest(name, names)}")

    def _record(self, db: sqlite3.Connection, row: sqlite3.Row) -> ModelRecord:
        id = row["id"]
        metrics = dict(
            db.execute("SELECT key, value FROM metric WHERE model = ?", (id,)).fetchall()
        )
        tags = db.execute("SELECT tag FROM tag WHERE model = ? ORDER BY tag", (id,)).fetchall()
        return ModelRecord(
            id=id,
            name=row["name"],
            version=row["version"],
            created=row["created"],
            removed=row["removed"],
            parent=row["parent"],
            parent_name=row["parent_name"],
            nbytes=row["nbytes"],
            tensors=row["tensors"],
            note=json.loads(row["note"]),
            metrics=metrics,
            tags=tuple(tag for (tag,) in tags),
        )

    def _free_version(self, db: sqlite3.Connection, model: NewModel) -> str:
        query = "SELECT version FROM model WHERE name = ?"
        if model.version is None:
            # Also those that were removed: a number is not given twice.
            return next_version(row[0] for row in db.execute(query, (model.name,)))
        taken = one(db, f"{query} AND version = ? AND removed IS NULL", (model.name, model.version))
        if taken is not None:
            raise ModelExists(
                f"{model.name}@{model.version} is there already, and a version never changes: save "
                "under another version, or remove this one"
            )
        if one(db, "SELECT 1 FROM tag WHERE name = ? AND tag = ?", (model.name, model.version)):
            raise ModelExists(
                f"{model.version!r} is a tag of {model.name} and cannot be a version as well"
            )
        return model.version

    def _tag(self, db: sqlite3.Connection, name: str, tag: str, id: int | None) -> None:
        query = "SELECT 1 FROM model WHERE name = ? AND version = ? AND removed IS NULL"
        if one(db, query, (name, tag)) is not None:
            raise ModelExists(f"{tag!r} is a version of {name} and cannot be a tag as well")
        db.execute("INSERT OR REPLACE INTO tag VALUES (?, ?, ?)", (name, tag, id))

    def _add_pack(self, db: sqlite3.Connection, pack: NewPack, refs: Mapping[int, int]) -> int:
        """The number of the first of its blobs; the others follow. ``refs`` are by their places."""
        live = sum(nbytes for _, nbytes in pack.blobs)
        cursor = db.execute(
            "INSERT INTO pack (key, nbytes, live) VALUES (?, ?, ?)", (pack.key, pack.nbytes, live)
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

    def _refer(self, db: sqlite3.Connection, blobs: Iterable[int], by: int) -> None:
        """Count references up or down; what nothing refers to any more is forgotten."""
        counts = Counter(blob for blob in blobs if blob != NOTHING)
        changed = db.executemany(
            "UPDATE blob SET refs = refs + ? WHERE id = ?",
            [(by * count, blob) for blob, count in counts.items()],
        ).rowcount
        if changed != len(counts):
            raise Gone("a tensor that was to be shared with another model was removed meanwhile")
        if by < 0:
            self._forget(db, sorted(counts))

    def _forget(self, db: sqlite3.Connection, blobs: Sequence[int]) -> None:
        for blob in blobs:
            row = one(db, "SELECT refs, pack, nbytes, same_as FROM blob WHERE id = ?", (blob,))
            refs, pack, nbytes, same_as = row
            if refs > 0:
                continue
            db.execute("DELETE FROM blob WHERE id = ?", (blob,))
            if same_as is None:
                db.execute("UPDATE pack SET live = live - ? WHERE id = ?", (nbytes, pack))
            else:
                db.execute("UPDATE blob SET refs = refs - 1 WHERE id = ?", (same_as,))
                self._forget(db, [same_as])


def _rows(db: sqlite3.Connection) -> sqlite3.Cursor:
    """A cursor whose rows know the names of their columns."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor
