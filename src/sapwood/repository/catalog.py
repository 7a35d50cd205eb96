"""What is in a repository: models, tags, metrics, lineage, and where each tensor's bytes lie.

References are counted and manifests come in one transaction, so that neither can be without the
other, whoever is killed when.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sapwood.errors import Damaged, Gone, ModelExists, ModelNotFound, StoreError
from sapwood.repository.base import NOTHING, Kin, ModelRecord, NewModel
from sapwood.repository.database import one
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
from sapwood.repository.packtable import NewPack, PackRow, PackTable, Place

__all__ = ["Catalog", "NewPack", "PackRow", "Place"]


_VARIABLES = 10_000
"""In one statement; SQLite takes three times as many."""
_KIN = "SELECT model, COUNT(*), SUM(nbytes) FROM layer WHERE id IN ({}) GROUP BY model"


class Catalog(PackTable):
    """The tables of one repository. Fork- and thread-safe; owned by the repository."""

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

    def places(self, blobs: Iterable[int], *, cold: bool = False) -> dict[int, Place]:
        """Where blobs lie now; gc may move them, so a place is not kept for long.

        Raises:
            Gone: one was removed.
            StoreError: one lies there in cold form, and the caller did not say that it can tell.
        """
        wanted = sorted({blob for blob in blobs if blob != NOTHING})
        found: dict[int, Place] = {}
        query = (
            "SELECT blob.id, pack.key, at.start, at.nbytes, at.mark, at.stored, at.base FROM blob "
            "JOIN blob AS at ON at.id = COALESCE(blob.same_as, blob.id) "
            "JOIN pack ON pack.id = at.pack WHERE blob.id IN (SELECT value FROM json_each(?))"
        )
        with self._database.reading() as db:
            for row in db.execute(query, (json.dumps(wanted),)):
                found[row[0]] = Place(*row)
        missing = [blob for blob in wanted if blob not in found]
        if missing:
            raise Gone(f"blob {missing[0]} was removed")
        if not cold and (frozen := [blob for blob, at in found.items() if at.base is not None]):
            raise StoreError(
                f"a tensor (blob {frozen[0]}) is in cold form, which is not read in this way: open "
                "the repository's folder itself"
            )
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

    def add(
        self,
        model: NewModel,
        pack: NewPack | None,
        *,
        synced: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> ModelRecord:
        """Make a version be there, with all it refers to.

        ``check`` is called where no gc can come in between: it raises if the pack is not there.

        Raises:
            ModelExists: it is there.
            Gone: something it was to share with others was removed.
        """
        with self._database.writing(synced=synced) as db:
            check()
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

    # -- removing ----------------------------------------------------------------------------

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

    def removed(self, after: int, limit: int) -> list[ModelRecord]:
        """Versions that were removed, by number, from above ``after``."""
        query = "SELECT * FROM model WHERE removed NOT NULL AND id > ? ORDER BY id LIMIT ?"
        with self._database.reading() as db:
            return [self._record(db, row) for row in _rows(db).execute(query, (after, limit))]

    def keep_removed(self, record: ModelRecord) -> None:
        """Remember a version that was removed from another catalog; again does nothing."""
        values = (
            record.id, record.name, record.version, record.created, record.removed, record.parent,
            record.parent_name, record.nbytes, record.tensors, json.dumps(dict(record.note)),
        )  # fmt: skip
        with self._database.writing() as db:
            if one(db, "SELECT 1 FROM model WHERE id = ?", (record.id,)) is not None:
                return
            db.execute(
                "INSERT INTO model (id, name, version, created, removed, parent, parent_name,"
                " nbytes, tensors, note) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            db.executemany(
                "INSERT INTO metric VALUES (?, ?, ?)",
                [(record.id, key, float(value)) for key, value in record.metrics.items()],
            )

    def forget(self, id: int) -> None:
        """Take away a version that another catalog has, and that it was there."""
        with self._database.writing() as db:
            row = one(db, "SELECT manifest FROM model WHERE id = ?", (id,))
            if row is None:
                return
            if row[0] is not None:
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
            versions = [row[0] for row in db.execute(query, (model.name,))]
            tags = db.execute("SELECT tag FROM tag WHERE name = ?", (model.name,))
            return next_version(versions, (tag for (tag,) in tags))
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


def _rows(db: sqlite3.Connection) -> sqlite3.Cursor:
    """A cursor whose rows know the names of their columns."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor
