"""Rewriting the tensors of versions as what differs from those of the version they come from.

The new form is written beside the plain one, read back, and compared with the tensor's digest. Only
then the catalog says that it is what there is, in one transaction; the plain form goes with the
next ``gc``, and whoever reads it meanwhile goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sapwood.errors import Damaged, Gone, ModelNotFound, NotFound
from sapwood.repository.base import NOTHING, ModelRecord
from sapwood.repository.catalog import Catalog, NewPack
from sapwood.repository.cold.form import encode, needs_zstd
from sapwood.repository.cold.pairs import BlobPair, ColdBlob, cool_blobs, pairs_worth
from sapwood.repository.cold.reading import ColdReader
from sapwood.repository.manifest import Manifest, nbytes_of
from sapwood.repository.merging import digest_of, sync
from sapwood.repository.packs import lay_out, new_key, pieces
from sapwood.storage import Durability, Keeper

__all__ = ["CHAIN", "Cooled", "Cooling", "cool"]

CHAIN = 8
"""Tensors that differ from each other in a row; each costs another read."""
_TRIES = 3
_AT_ONCE = 256 * 2**20
"""Bytes of plain tensors whose cold form is written as one pack."""


@dataclass(frozen=True, kw_only=True)
class Cooled:
    """What cooling did."""

    versions: int = 0
    """That were looked at."""
    tensors: int = 0
    """That are in cold form now."""
    kept: int = 0
    """That stay plain: in cold form they would take hardly less, or be slow to read."""
    before: int = 0
    """Bytes of those that were rewritten."""
    after: int = 0
    """What they take now."""

    def __add__(self, other: Cooled) -> Cooled:
        """Both together."""
        return Cooled(
            versions=self.versions + other.versions,
            tensors=self.tensors + other.tensors,
            kept=self.kept + other.kept,
            before=self.before + other.before,
            after=self.after + other.after,
        )


@runtime_checkable
class Cooling(Protocol):
    """A back end that can keep tensors in cold form."""

    def cool(self, record: ModelRecord, *, chain: int, said: Callable[[str], None]) -> Cooled:
        """Rewrite a version's tensors as what differs from its nearest ancestor's."""
        ...


def cool(
    catalog: Catalog,
    keeper: Keeper,
    record: ModelRecord,
    *,
    chain: int = CHAIN,
    said: Callable[[str], None] = lambda _: None,
) -> Cooled:
    """Do it for one version; every blob must have a digest by now."""
    needs_zstd()
    ancestor = _ancestor(catalog, record)
    if ancestor is None:
        return Cooled(versions=1)
    _, mine = catalog.manifest(record.reference)
    _, theirs = catalog.manifest(ancestor.reference)
    pairs = pairs_worth(catalog, list(_alike(mine, theirs)), chain)
    said(f"{record.reference}: comparing {len(pairs)} tensors with {ancestor.reference}")
    found = Cooled(versions=1)
    for some in _batches(pairs):
        found += _cool_patiently(catalog, keeper, some, chain)
    return found


def _ancestor(catalog: Catalog, record: ModelRecord) -> ModelRecord | None:
    """The nearest one that was not removed."""
    seen = {record.id}
    while record.parent is not None and record.parent not in seen:
        try:
            record = catalog.by_id(record.parent, record.parent_name or "")
        except ModelNotFound:
            return None
        if record.removed is None:
            return record
        seen.add(record.id)
    return None


def _alike(mine: Manifest, theirs: Manifest) -> Iterator[BlobPair]:
    """Tensors of the same name, shape and dtype; those without a name have the same number."""
    named = {number for _, number in mine.names}
    others = {number for _, number in theirs.names}
    partner = {n: theirs.by_name[name] for name, n in mine.names if name in theirs.by_name}
    for number in range(len(mine.dtypes)):
        if number not in named and number < len(theirs.dtypes) and number not in others:
            partner[number] = number
    for number, other in partner.items():
        row, base = mine.row(number), theirs.row(other)
        if (row.dtype, row.shape) == (base.dtype, base.shape) and NOTHING not in (
            row.blob,
            base.blob,
        ):
            yield BlobPair(row.blob, base.blob, nbytes_of(row.dtype, ()))


def _batches(pairs: Sequence[BlobPair]) -> Iterator[list[BlobPair]]:
    some: list[BlobPair] = []
    for pair in pairs:
        some.append(pair)
        if sum(one.nbytes for one in some) >= _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _cool_patiently(
    catalog: Catalog,
    keeper: Keeper,
    pairs: Sequence[BlobPair],
    chain: int,
) -> Cooled:
    """Again where gc has moved something meanwhile; if it goes on doing so, they stay plain."""
    for _ in range(_TRIES):
        try:
            return _cool(catalog, keeper, pairs, chain)
        except (NotFound, Gone):
            continue
    return Cooled(kept=len(pairs))


def _cool(
    catalog: Catalog,
    keeper: Keeper,
    pairs: Sequence[BlobPair],
    chain: int,
) -> Cooled:
    reader = ColdReader(catalog, keeper)
    forms: list[tuple[BlobPair, bytes]] = []
    blobs = {blob for pair in pairs for blob in (pair.blob, pair.base)}
    places = catalog.places(blobs, cold=True)
    for pair in pairs:
        data, base = reader.whole(places[pair.blob]), reader.whole(places[pair.base])
        form = encode(data, base, pair.itemsize)
        if form is not None:
            forms.append((pair, form))
    if not forms:
        return Cooled(kept=len(pairs))
    starts, nbytes = lay_out([len(form) for _, form in forms])
    key = new_key()
    durability = min(Durability.SYNCED, keeper.durability)
    with keeper.begin(key, nbytes, durability=durability) as draft:
        draft.write_parts(pieces(starts, [memoryview(form) for _, form in forms]))
        draft.publish()
    written = [
        ColdBlob(places[pair.blob], start, len(form), pair.base)
        for (pair, form), start in zip(forms, starts, strict=True)
    ]
    try:
        _verify(reader, key, written, {pair.blob: pair.digest for pair, _ in forms})
        sync(catalog, keeper, catalog.unsynced(pair.base for pair, _ in forms))
        pack = NewPack(key=key, nbytes=nbytes, blobs=(), synced=True)
        done = cool_blobs(catalog, pack, written, chain, lambda: keeper.size(key))
    except NotFound:  # a gc took the pack for one whose writer had died; the next time will do
        return Cooled(kept=len(pairs))
    except BaseException:
        keeper.remove([key])
        raise
    if not done:
        keeper.remove([key])
    return Cooled(
        tensors=len(done),
        kept=len(pairs) - len(done),
        before=sum(one.place.nbytes for one in done),
        after=sum(one.stored for one in done),
    )


def _verify(
    reader: ColdReader, key: str, blobs: Sequence[ColdBlob], digests: dict[int, bytes]
) -> None:
    """Read what was written, and see that it gives the tensors back.

    Raises:
        Damaged: it does not; the plain forms stay.
    """
    for one in blobs:
        if digest_of(reader.whole(one.place_in(key))) != digests[one.place.blob]:
            raise Damaged(
                f"blob {one.place.blob} does not come back from its cold form as it was, or its "
                "plain form is damaged; it stays as it is: look with sapwood store verify"
            )
