"""A repository whose catalog is a database here: tensors in packs of a keeper, the rest in SQLite.

A save writes one pack, then makes it be there by one transaction. Whoever is killed in between
leaves a pack that no catalog knows, which ``gc`` removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sapwood.errors import CannotMap, Damaged, Gone, NotFound
from sapwood.repository.base import BlobPart, Kin, ModelRecord, NewModel, fresh
from sapwood.repository.catalog import Catalog, NewPack, Place
from sapwood.repository.database import Database
from sapwood.repository.manifest import Manifest
from sapwood.repository.merging import Merger
from sapwood.repository.names import Reference, is_hidden
from sapwood.repository.packs import lay_out, new_key, pieces
from sapwood.repository.sweeping import Swept, reclaim, sweep
from sapwood.repository.verifying import Verified, verify
from sapwood.storage import Durability, Keeper, Wanted
from sapwood.storage.base import Mappable

__all__ = ["LocalBackend", "equal_bytes"]

_TRIES = 3
_PROBE = 4096
"""Tensors that differ mostly do so at once: so much is looked at before all of it is."""
_BLOCK = 2**20


class LocalBackend:
    """A folder, or memory.

    Fulfils ``Backend``, ``Mappable``, ``Merging`` and ``Reclaiming``.

    Owns its database, its keeper, and the thread that merges equal tensors.
    """

    def __init__(self, name: str, database: Database, keeper: Keeper) -> None:
        """Take over what an earlier process left to be hashed."""
        self.name = name
        self.keeper = keeper
        self.database = database
        self.catalog = Catalog(database)
        self._merger = Merger(self.catalog, keeper)

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        model: NewModel,
        sources: Sequence[memoryview],
        alike: Mapping[int, int],
        durability: Durability,
    ) -> ModelRecord:
        """Write what is not there yet as one pack, then make it be there."""
        for _ in range(_TRIES):
            shared = self._same(sources, alike)
            try:
                return self._save(model, sources, shared, durability)
            except Gone:
                alike = {}  # the parent was removed meanwhile
        return self._save(model, sources, {}, durability)

    def _save(
        self,
        model: NewModel,
        sources: Sequence[memoryview],
        shared: Mapping[int, int],
        durability: Durability,
    ) -> ModelRecord:
        new = [i for i, data in enumerate(sources) if len(data) and i not in shared]
        starts, nbytes = lay_out([len(sources[i]) for i in new])
        place = {fresh(i): fresh(k) for k, i in enumerate(new)}
        place |= {fresh(i): blob for i, blob in shared.items()}
        model = model.with_blobs(tuple(place.get(b, b) for b in model.manifest.blobs))
        synced = durability >= Durability.SYNCED
        if not new:
            return self.add(model, None, synced=synced)
        pack = NewPack(
            key=new_key(),
            nbytes=nbytes,
            blobs=[(start, len(sources[i])) for start, i in zip(starts, new, strict=True)],
        )
        with self.keeper.begin(pack.key, nbytes, durability=durability) as draft:
            draft.write_parts(pieces(starts, [sources[i] for i in new]))
            draft.publish()
        return self.add(model, pack, synced=synced)

    def add(self, model: NewModel, pack: NewPack | None, *, synced: bool) -> ModelRecord:
        """Make a version be there whose pack the keeper has; if that fails, the pack goes.

        Raises:
            ModelExists: it is there.
            Gone: something it was to share with others was removed.
        """
        try:
            record = self.catalog.add(model, pack, synced=synced)
        except BaseException:
            if pack is not None:
                self.keeper.remove([pack.key])
            raise
        if pack is not None and not is_hidden(model.name):  # what goes soon is not worth hashing
            self._merger.wake()
        return record

    def _same(self, sources: Sequence[memoryview], alike: Mapping[int, int]) -> dict[int, int]:
        """Those of the blobs that may be equal which are, by every byte."""
        if not alike:
            return {}
        try:
            stored = self.mapped(list(alike.values()))
        except Gone:
            return {}
        if stored is None:
            stored = self._read_whole(alike.values())
        return {i: blob for i, blob in alike.items() if equal_bytes(sources[i], stored[blob])}

    def _read_whole(self, blobs: Iterable[int]) -> dict[int, memoryview]:
        places = self.catalog.places(blobs)
        found = {blob: memoryview(bytearray(place.nbytes)) for blob, place in places.items()}
        self.read([BlobPart(blob, 0, data) for blob, data in found.items()])
        return found

    # -- reading -----------------------------------------------------------------------------

    def read(self, parts: Sequence[BlobPart]) -> None:
        """Fill buffers, with as few requests as possible."""
        for attempt in range(_TRIES):
            places = self.catalog.places(part.blob for part in parts)
            try:
                self.keeper.read([_wanted(places[part.blob], part) for part in parts])
            except NotFound as error:
                if attempt == _TRIES - 1:
                    raise Damaged(f"{self.name}: {error}; a pack is missing") from error
            else:
                return

    def mapped(self, blobs: Sequence[int]) -> Mapping[int, memoryview] | None:
        """Blobs where they lie; what is written to them is private to who asked."""
        if not isinstance(self.keeper, Mappable):
            return None
        for attempt in range(_TRIES):
            places = self.catalog.places(blobs)
            try:
                return self._mapped(places)
            except CannotMap:
                return None
            except NotFound as error:
                if attempt == _TRIES - 1:
                    raise Damaged(f"{self.name}: {error}; a pack is missing") from error
        raise AssertionError  # never: the loop returns or raises

    def _mapped(self, places: Mapping[int, Place]) -> dict[int, memoryview]:
        assert isinstance(self.keeper, Mappable)
        packs: dict[str, memoryview] = {}
        for key in {place.pack for place in places.values()}:
            packs[key] = self.keeper.map(key, writable=True).data
        found = {}
        for blob, place in places.items():
            end = place.start + place.nbytes
            if end > len(packs[place.pack]):
                raise Damaged(f"{self.name}: pack {place.pack} is truncated")
            found[blob] = packs[place.pack][place.start : end]
        return found

    def canonical(self, blobs: Sequence[int]) -> Mapping[int, int | None]:
        """As the catalog has them."""
        return self.catalog.canonical(blobs)

    # -- names -------------------------------------------------------------------------------

    def find(self, reference: Reference) -> ModelRecord:
        """As the catalog has it."""
        return self.catalog.find(reference)

    def manifest(self, reference: Reference) -> tuple[ModelRecord, Manifest]:
        """As the catalog has it."""
        return self.catalog.manifest(reference)

    def models(self, pattern: str = "*") -> Sequence[ModelRecord]:
        """As the catalog has them."""
        return self.catalog.models(pattern)

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As the catalog has it."""
        return self.catalog.by_id(id, name)

    def children(self, id: int) -> Sequence[ModelRecord]:
        """As the catalog has them."""
        return self.catalog.children(id)

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """From the catalog's index of layers."""
        return self.catalog.kin(layers, pattern, limit, by, lower)

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """From the catalog."""
        return self.catalog.configs(digests)

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """In the catalog."""
        return self.catalog.tag(reference, tag)

    def untag(self, name: str, tag: str) -> None:
        """In the catalog."""
        self.catalog.untag(name, tag)

    def remove(self, reference: Reference) -> ModelRecord:
        """In the catalog; packs stay until ``gc``."""
        return self.catalog.remove(reference)

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Merge what is equal, then remove what nobody needs."""
        self.flush()
        return sweep(self.catalog, self.keeper, quiet=quiet, said=said)

    def reclaim(self) -> int:
        """Remove packs nobody needs, and rewrite those that are mostly of no use."""
        return reclaim(self.catalog, self.keeper)

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Of the catalog and every pack."""
        return verify(self.catalog, self.keeper, said=said)

    # -- the end -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait for the merger."""
        self._merger.flush()

    def close(self) -> None:
        """End the merger, wherever it is: the next process goes on."""
        self._merger.close()
        self.keeper.close()
        self.database.close()


def _wanted(place: Place, part: BlobPart) -> Wanted:
    if part.start < 0 or part.start + len(part.out) > place.nbytes:
        raise Damaged(
            f"a tensor of {place.nbytes} bytes was asked for {part.start} to "
            f"{part.start + len(part.out)}: its manifest does not belong to it"
        )
    return Wanted(place.pack, place.start + part.start, part.out)


def equal_bytes(one: memoryview, other: memoryview) -> bool:
    """By every byte; a block at a time, so that those that differ cost next to nothing."""
    if len(one) != len(other):
        return False
    step = _PROBE
    start = 0
    while start < len(one):
        mine, theirs = one[start : start + step], other[start : start + step]
        if not np.array_equal(_words(mine), _words(theirs)):
            return False
        start, step = start + step, _BLOCK
    return True


def _words(data: memoryview) -> npt.NDArray[np.generic]:
    """As few elements as possible: comparing them is what takes the time."""
    return np.frombuffer(data, np.uint8 if len(data) % 8 else np.uint64)
