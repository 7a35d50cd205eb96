"""The heads that a provider keeps: records, manifests and keys, in a catalog without bytes.

The keys of a version's tensors stand before its architecture graph, so that they come and go with
the manifest in one transaction. Their sizes are those of the tensors; only hashes are kept.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sapwood.errors import Damaged, ModelExists, ModelNotFound, StoreError
from sapwood.repository.architecture import configs_of
from sapwood.repository.base import NOTHING, ModelRecord, NewModel
from sapwood.repository.catalog import Catalog
from sapwood.repository.database import Database, one
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, new_id, next_version
from sapwood.repository.providers.base import Head, VersionKey
from sapwood.repository.providers.placement import KEY_BYTES

__all__ = ["RESERVED_SECONDS", "HeadStore"]

RESERVED_SECONDS = 600.0
"""How long a version is somebody's who has reserved it, and neither saved it nor given it up."""
_PREFIX = struct.Struct("<8sI")
_MAGIC = b"SWKEYS01"
_MARK = KEY_BYTES - 8
_CONFIG_OF = """
CREATE TABLE IF NOT EXISTS config_of (
    digest BLOB NOT NULL, name TEXT NOT NULL, PRIMARY KEY (digest, name)
) WITHOUT ROWID
"""


@dataclass(frozen=True)
class _Reservation:
    id: int
    holder: object
    until: float


class HeadStore:
    """Heads and reservations. Thread-safe; the database stays the caller's to close."""

    def __init__(self, catalog: Catalog, database: Database) -> None:
        """The database is used by nobody else, in this process or another."""
        self.catalog = catalog
        self._database = database
        self._lock = threading.RLock()
        self._reserved: dict[tuple[str, str], _Reservation] = {}
        self._last = 0
        with database.writing() as db:
            db.execute(_CONFIG_OF)

    # -- saving ------------------------------------------------------------------------------

    def reserve(self, name: str, version: str | None, holder: object = None) -> VersionKey:
        """The number of a version to be; ``holder`` is who can give it up with all others.

        Raises:
            ModelExists: it is there, or somebody else is saving it.
        """
        with self._lock:
            self._expire()
            if version is None:
                version = next_version([*self._versions(name), *self._reserved_of(name)])
            else:
                self._refuse_taken(name, version)
            with self._database.reading() as db:
                largest = int(one(db, "SELECT coalesce(max(id), 0) FROM model")[0])
            self._last = new_id(max(largest, self._last))
            until = time.monotonic() + RESERVED_SECONDS
            self._reserved[name, version] = _Reservation(self._last, holder, until)
            return VersionKey(name, version, self._last)

    def _refuse_taken(self, name: str, version: str) -> None:
        if self.catalog.exists(name, version):
            raise _exists(name, version)
        if (name, version) in self._reserved:
            raise ModelExists(
                f"{name}@{version} is being saved by somebody else; if that one has died, try "
                f"again in {RESERVED_SECONDS / 60:.0f} minutes, or save under another version"
            )
        with self._database.reading() as db:
            query = "SELECT 1 FROM tag WHERE name = ? AND tag = ?"
            if one(db, query, (name, version)) is not None:
                raise ModelExists(f"{version!r} is a tag of {name} and cannot be a version as well")

    def give_up(self, holder: object) -> None:
        """End what one holder has reserved."""
        with self._lock:
            self._reserved = {k: r for k, r in self._reserved.items() if r.holder is not holder}

    def put(self, head: Head, *, synced: bool) -> ModelRecord:
        """Make a version be there; the same once more does nothing.

        Raises:
            ModelExists: it is there with another number, or was removed.
            StoreError: it is not well formed.
        """
        model = head.model
        if model.id is None or model.version is None:
            raise StoreError(f"{model.name}: a head has a number and a version; see reserve")
        stored = _with_keys(model, head.keys)
        with self._lock:
            with self._database.reading() as db:
                query = "SELECT name, version, removed FROM model WHERE id = ?"
                row = one(db, query, (model.id,))
            if row is not None:
                if tuple(row) == (model.name, model.version, None):
                    return self.catalog.by_id(model.id, model.name)
                raise ModelExists(
                    f"{model.name}@{model.version}: its number {model.id} belongs to another "
                    "version, or to one that was removed; reserve a new one"
                )
            with self._database.writing() as db:
                # Before the head: who reads it finds its configurations.
                rows = [(digest, model.name) for digest in model.configs]
                db.executemany("INSERT OR IGNORE INTO config_of VALUES (?, ?)", rows)
            record = self.catalog.add(stored, None, synced=synced)
            self._end_reservation(model.name, model.version)
            return record

    def remove(self, version: VersionKey) -> None:
        """Remove a version, or give up that it was reserved; again does nothing.

        Raises:
            ModelNotFound: there never was one.
        """
        with self._lock:
            reserved = self._reserved.get((version.name, version.version))
            if reserved is not None and reserved.id == version.id:
                del self._reserved[version.name, version.version]
                return
            if self.has(version):
                self.catalog.remove(Reference(version.name, version.version))
            else:
                self.catalog.by_id(version.id, version.name)

    # -- looking -----------------------------------------------------------------------------

    def has(self, version: VersionKey) -> bool:
        """Whether a version is there, under this number."""
        query = "SELECT 1 FROM model WHERE id = ? AND name = ? AND version = ? AND removed IS NULL"
        with self._database.reading() as db:
            row = one(db, query, (version.id, version.name, version.version))
        return row is not None

    def get(self, reference: Reference) -> tuple[ModelRecord, Manifest, tuple[bytes, ...]]:
        """A version, its manifest and its tensors' keys.

        Raises:
            ModelNotFound: there is none.
        """
        record, manifest = self.catalog.manifest(reference)
        manifest, keys = _without_keys(manifest)
        return record, manifest, keys

    def copy(self, version: VersionKey) -> Head:
        """A head as it was put, with its tags.

        Raises:
            ModelNotFound: it is not here.
        """
        record, manifest, keys = self.get(Reference(version.name, version.version))
        if record.id != version.id:
            raise ModelNotFound(f"{record.reference} is here with another number than {version.id}")
        digests = configs_of(manifest.graph) if manifest.graph else []
        model = NewModel(
            name=record.name,
            version=record.version,
            manifest=manifest,
            parent=record.parent,
            parent_name=record.parent_name,
            id=record.id,
            tags=record.tags,
            metrics=record.metrics,
            note=record.note,
            layers=self.catalog.layers(record.id),
            configs=dict(zip(digests, self.catalog.configs(digests), strict=True)),
        )
        return Head(model=model, keys=keys)

    def drop(self, version: VersionKey) -> None:
        """Forget a head that belongs elsewhere now; no error if it is not here."""
        with self._lock:
            if self.has(version):
                self.catalog.forget(version.id)

    def config_users(self, digest: bytes) -> list[str]:
        """The models that a configuration of a layer came with."""
        query = "SELECT name FROM config_of WHERE digest = ?"
        with self._database.reading() as db:
            return [row[0] for row in db.execute(query, (digest,))]

    def reserved_by(self, version: VersionKey, holder: object) -> bool:
        """Whether a holder has reserved this version, and not saved it yet."""
        with self._lock:
            found = self._reserved.get((version.name, version.version))
            return found is not None and (found.id, found.holder) == (version.id, holder)

    def problems(self) -> list[str]:
        """What is wrong with heads, a line each."""
        found = []
        for record in self.catalog.models():
            try:
                self.get(record.reference)
            except ModelNotFound:
                continue  # removed meanwhile
            except (StoreError, Damaged) as error:
                found.append(f"{record.reference}: {error}")
        return found

    # -- inside ------------------------------------------------------------------------------

    def _versions(self, name: str) -> list[str]:
        """Also those that were removed: a number is not given twice."""
        with self._database.reading() as db:
            rows = db.execute("SELECT version FROM model WHERE name = ?", (name,))
            return [row[0] for row in rows]

    def _reserved_of(self, name: str) -> list[str]:
        return [version for known, version in self._reserved if known == name]

    def _end_reservation(self, name: str, version: str) -> None:
        self._reserved.pop((name, version), None)

    def _expire(self) -> None:
        now = time.monotonic()
        self._reserved = {k: r for k, r in self._reserved.items() if r.until > now}


def _exists(name: str, version: str) -> ModelExists:
    return ModelExists(
        f"{name}@{version} is there already, and a version never changes: save under another "
        "version, or remove this one"
    )


def _with_keys(model: NewModel, keys: Sequence[bytes]) -> NewModel:
    """What the catalog keeps; sizes in keys are those of the tensors, so they are left out."""
    manifest = model.manifest
    if len(keys) != len(manifest.sizes):
        raise StoreError(
            f"{model.name}: {len(keys)} keys for {len(manifest.sizes)} tensors; a head has one for "
            "each"
        )
    for key, nbytes in zip(keys, manifest.sizes, strict=True):
        fits = len(key) == KEY_BYTES and int.from_bytes(key[:8], "little") == nbytes
        if not fits and (key or nbytes):
            raise StoreError(
                f"{model.name}: {key.hex()!r} is not the key of a tensor of {nbytes} bytes; use "
                "placement.key_of"
            )
    if any(blob != NOTHING for blob in manifest.blobs):
        raise StoreError(f"{model.name}: the manifest of a head refers to no blobs, but to NOTHING")
    marks = b"".join(key[8:] for key in keys)
    prefix = _PREFIX.pack(_MAGIC, len(marks) // _MARK)
    return replace(model, manifest=replace(manifest, graph=prefix + marks + manifest.graph))


def _without_keys(manifest: Manifest) -> tuple[Manifest, tuple[bytes, ...]]:
    data = manifest.graph
    magic, count = _PREFIX.unpack_from(data) if len(data) >= _PREFIX.size else (b"", 0)
    sizes = manifest.sizes
    end = _PREFIX.size + count * _MARK
    if magic != _MAGIC or count != sum(map(bool, sizes)) or len(data) < end:
        raise Damaged("a head is damaged: the keys of its tensors are not there")
    marks = (data[at : at + _MARK] for at in range(_PREFIX.size, end, _MARK))
    keys = tuple(nbytes.to_bytes(8, "little") + next(marks) if nbytes else b"" for nbytes in sizes)
    return replace(manifest, graph=data[end:]), keys
