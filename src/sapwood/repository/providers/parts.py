"""The tensors that a provider keeps, by version and key, over a back end of its own.

What one call puts is one *fragment*: a version in the back end's catalog, whose parent is the
number of the version it belongs to and whose tensors are named by their keys. So equal tensors,
packs, gc and whoever is killed when are the back end's business.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sapwood.errors import Damaged, Gone, StoreError
from sapwood.repository.base import BlobPart, ModelRecord, NewModel, fresh
from sapwood.repository.catalog import NewPack, Place
from sapwood.repository.database import one
from sapwood.repository.local import LocalBackend
from sapwood.repository.manifest import Manifest
from sapwood.repository.merging import digest_of
from sapwood.repository.names import Reference
from sapwood.repository.packs import lay_out, new_key
from sapwood.repository.providers.base import NewPart, Part, PartRange, VersionKey
from sapwood.repository.providers.placement import KEY_BYTES
from sapwood.storage import Durability

__all__ = ["PartPlan", "PartStore", "size_of"]

_OWNER = (
    "CREATE TABLE IF NOT EXISTS owner (pack TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID"
)
_KNOWN = 64
"""Versions whose tables of keys are kept in memory."""
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """What is to be done about a part that somebody wants to put."""

    part: NewPart
    refused: tuple[int, ...]
    """Of ``same_as``: no equal tensor was found, so they must be sent."""
    wanted: tuple[int, ...]
    """Sources whose bytes are to be written; the others are here."""
    shared: Mapping[int, int]
    """Sources that are equal to a blob."""
    key: str
    """Of the pack to be."""
    starts: tuple[int, ...]
    """Where in the pack each of the wanted begins."""
    nbytes: int
    """Of the pack."""


class PartStore:
    """Fragments of versions. Thread-safe; the back end stays the caller's to close."""

    def __init__(self, backend: LocalBackend) -> None:
        """The back end is used by nobody else, in this process or another."""
        self.backend = backend
        self._lock = threading.Lock()
        self._known: OrderedDict[VersionKey, dict[bytes, int]] = OrderedDict()
        with backend.database.writing() as db:
            db.execute(_OWNER)

    # -- putting -----------------------------------------------------------------------------

    def plan(self, part: NewPart) -> PartPlan:
        """What must be sent of a part.

        Raises:
            StoreError: it is not well formed.
        """
        _check_keys(part)
        here = self.blobs(part.version)
        shared: dict[int, int] = {}
        refused, wanted = [], []
        for index, key in enumerate(part.keys):
            if key in here:
                continue
            if index not in part.same_as:
                wanted.append(index)
            elif (blob := self._equal(key, *part.same_as[index])) is not None:
                shared[index] = blob
            else:
                refused.append(index)
        starts, nbytes = lay_out([size_of(part.keys[i]) for i in wanted])
        return PartPlan(
            part=part,
            refused=tuple(refused),
            wanted=tuple(wanted),
            shared=shared,
            key=new_key(),
            starts=tuple(starts),
            nbytes=nbytes,
        )

    def put(
        self, plan: PartPlan, write: Callable[[PartPlan], None], durability: Durability
    ) -> list[int]:
        """Let ``write`` make the pack, and keep the part; what must be sent after all.

        ``write`` puts ``plan.nbytes`` bytes into the keeper under ``plan.key``.
        """
        if plan.refused:
            return list(plan.refused)
        added = (*plan.wanted, *plan.shared)
        if not added:
            return []
        blobs = {index: fresh(n) for n, index in enumerate(plan.wanted)} | dict(plan.shared)
        model = _fragment(plan.part.version, [(plan.part.keys[i], blobs[i]) for i in added])
        pack = None
        if plan.wanted:
            sizes = [size_of(plan.part.keys[i]) for i in plan.wanted]
            pack = NewPack(
                key=plan.key, nbytes=plan.nbytes, blobs=list(zip(plan.starts, sizes, strict=True))
            )
            self._own(plan.key, plan.part.version.name)
            write(plan)
        try:
            self.backend.add(model, pack, synced=durability >= Durability.SYNCED)
        except Gone:  # what it was to share was removed since
            return sorted(plan.shared)
        finally:
            self._forget(plan.part.version)
        return []

    def _equal(self, key: bytes, version: VersionKey, digest: bytes) -> int | None:
        """The blob of another version with this key, if its bytes have this digest."""
        blob = self.blobs(version).get(key)
        if blob is None:
            return None
        try:
            return blob if self._digest(blob, size_of(key)) == digest else None
        except (Gone, Damaged):
            return None

    def _digest(self, blob: int, nbytes: int) -> bytes:
        query = (
            "SELECT at.digest FROM blob JOIN blob AS at ON at.id = COALESCE(blob.same_as, blob.id) "
            "WHERE blob.id = ?"
        )
        with self.backend.database.reading() as db:
            row = one(db, query, (blob,))
        if row is not None and row[0] is not None:
            return bytes(row[0])
        data = bytearray(nbytes)
        self.backend.read([BlobPart(blob, 0, memoryview(data))])
        return digest_of(data)

    def _own(self, pack: str, name: str) -> None:
        with self.backend.database.writing() as db:
            db.execute("INSERT OR REPLACE INTO owner VALUES (?, ?)", (pack, name))

    # -- looking -----------------------------------------------------------------------------

    def blobs(self, version: VersionKey) -> Mapping[bytes, int]:
        """The blobs of a version's tensors that are here, by key."""
        with self._lock:
            found = self._known.get(version)
            if found is None:
                found = {}
                for record in self._fragments(version):
                    found |= self._keys(record)
                self._known[version] = found
                while len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(version)
            return found

    def places(self, version: VersionKey, keys: Iterable[bytes]) -> dict[bytes, Place]:
        """Where tensors of a version lie now, of those that are here."""
        wanted = set(keys)
        for attempt in range(_TRIES):
            here = self.blobs(version)
            blobs = {key: here[key] for key in wanted if key in here}
            try:
                places = self.backend.catalog.places(blobs.values())
            except Gone:
                self._forget(version)
                if attempt == _TRIES - 1:
                    raise
            else:
                return {key: places[blob] for key, blob in blobs.items()}
        raise AssertionError  # never: the loop returns or raises

    def read(self, version: VersionKey, ranges: Sequence[PartRange]) -> list[int]:
        """Fill buffers; the indices of those whose tensors are not here."""
        for attempt in range(_TRIES):
            here = self.blobs(version)
            found = [
                BlobPart(here[one.key], one.start, one.out) for one in ranges if one.key in here
            ]
            try:
                self.backend.read(found)
            except Gone:
                self._forget(version)
                if attempt == _TRIES - 1:
                    raise
            else:
                return [i for i, one in enumerate(ranges) if one.key not in here]
        raise AssertionError  # never: the loop returns or raises

    def mapped(
        self, version: VersionKey, keys: Sequence[bytes]
    ) -> Mapping[bytes, memoryview] | None:
        """Tensors where they lie, of those that are here; None where that cannot be had."""
        here = self.blobs(version)
        blobs = {key: here[key] for key in keys if key in here}
        found = self.backend.mapped(list(blobs.values()))
        return None if found is None else {key: found[blob] for key, blob in blobs.items()}

    def owners(self, packs: Iterable[str]) -> dict[str, str]:
        """The models whose bytes packs hold, and no other's; without those that gc has written."""
        query = "SELECT pack, name FROM owner WHERE pack IN (SELECT value FROM json_each(?))"
        with self.backend.database.reading() as db:
            return dict(db.execute(query, (json.dumps(sorted(set(packs))),)).fetchall())

    def parts(self, after: int, limit: int) -> list[Part]:
        """What is here, by number of version, from above ``after``."""
        query = (
            "SELECT parent, name, note, created, manifest FROM model WHERE removed IS NULL AND "
            "parent IN (SELECT DISTINCT parent FROM model WHERE removed IS NULL AND parent > ? "
            "ORDER BY parent LIMIT ?) ORDER BY parent, id"
        )
        found: dict[VersionKey, tuple[dict[bytes, None], float]] = {}
        with self.backend.database.reading() as db:
            for parent, name, note, created, manifest in db.execute(query, (after, limit)):
                version = VersionKey(name, json.loads(note)["version"], parent)
                keys, began = found.setdefault(version, ({}, created))
                keys |= dict.fromkeys(map(bytes.fromhex, Manifest.decode(manifest).by_name))
                found[version] = keys, min(began, created)
        return [
            Part(version, tuple(keys), sum(map(size_of, keys)), created)
            for version, (keys, created) in found.items()
        ]

    # -- removing ----------------------------------------------------------------------------

    def drop(self, version: VersionKey, keys: Sequence[bytes] | None) -> None:
        """Forget tensors of a version; no error if there are none."""
        gone = None if keys is None else set(keys)
        for record in self._fragments(version):
            mine = self._keys(record).items()
            rest = [] if gone is None else [one for one in mine if one[0] not in gone]
            if rest and len(rest) == record.tensors:
                continue
            if rest:
                # First: whoever dies in between leaves more than was asked for, never less.
                self.backend.add(_fragment(version, rest), None, synced=False)
            self.backend.remove(record.reference)
        self._forget(version)
        self.clean()

    def clean(self) -> None:
        """Forget that fragments were there, and packs that are gone: nobody asks for them."""
        with self.backend.database.writing() as db:
            db.execute("DELETE FROM model WHERE removed IS NOT NULL")

    def disown(self, quiet: float) -> None:
        """Forget whose packs were that are gone; those of saves under way are younger."""
        young = f"{int((time.time() - quiet) * 1000):012x}"
        with self.backend.database.writing() as db:
            db.execute(
                "DELETE FROM owner WHERE pack NOT IN (SELECT key FROM pack) "
                "AND substr(pack, -25) < ?",
                (young,),
            )

    # -- inside ------------------------------------------------------------------------------

    def _fragments(self, version: VersionKey) -> list[ModelRecord]:
        # By name as well: who makes up a number does not get at another model's tensors.
        return [
            record
            for record in self.backend.catalog.children(version.id)
            if record.removed is None
            and record.name == version.name
            and record.note.get("version") == version.version
        ]

    def _keys(self, record: ModelRecord) -> dict[bytes, int]:
        reference = Reference(record.name, record.version)
        _, manifest = self.backend.catalog.manifest(reference)
        return {bytes.fromhex(name): manifest.blobs[n] for name, n in manifest.names}

    def _forget(self, version: VersionKey) -> None:
        with self._lock:
            self._known.pop(version, None)


def size_of(key: bytes) -> int:
    """Bytes of the tensor with this key."""
    return int.from_bytes(key[:8], "little")


def _check_keys(part: NewPart) -> None:
    for key in part.keys:
        if len(key) != KEY_BYTES or not 0 < size_of(key) < 2**62:
            raise StoreError(
                f"{part.version.name}@{part.version.version}: {key.hex()!r} is no key of a tensor; "
                "use placement.key_of, and leave out tensors without elements"
            )
    if len(set(part.keys)) != len(part.keys):
        raise StoreError(
            f"{part.version.name}@{part.version.version}: a part has each key once; tensors that "
            "are equal have the same one"
        )


def _fragment(version: VersionKey, tensors: Sequence[tuple[bytes, int]]) -> NewModel:
    """A version in the back end's catalog, of tensors with these keys and blobs."""
    count = len(tensors)
    manifest = Manifest(
        ("uint8",) * count,
        tuple((size_of(key),) for key, _ in tensors),
        tuple(blob for _, blob in tensors),
        tuple((key.hex(), number) for number, (key, _) in enumerate(tensors)),
        None,
    )
    return NewModel(
        name=version.name,
        version=f"{version.version}.{secrets.token_hex(6)}",
        manifest=manifest,
        parent=version.id,
        parent_name=version.name,
        note={"version": version.version},
    )
