"""Saving a version: what is there already is shared, the rest is one pack.

A pack that is shared must not be removed between the look at it and the event that makes the
version be there. The saver puts a *lease* on it and then looks whether a gc has condemned it; a gc
condemns it and then looks whether there is a lease. So at least one of the two sees the other, and
gives way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from sapwood.errors import Gone, NotFound, StorageError
from sapwood.repository.base import NOTHING, NewModel
from sapwood.repository.merging import digest_of, mark_of
from sapwood.repository.objects.blobs import Blobs
from sapwood.repository.objects.head import BlobRow, Head, encode_layers
from sapwood.repository.objects.journal import side_by_side
from sapwood.repository.objects.layout import (
    CONDEMNED,
    HEADS,
    LAYERS,
    LEASES,
    framed_json,
    new_token,
    sharded,
)
from sapwood.repository.packs import lay_out, new_key, pieces
from sapwood.storage import Durability, Keeper

__all__ = ["LEASE_KIND", "Plan", "Source", "Written", "forget", "leased", "plan", "usable", "write"]

log = logging.getLogger(__name__)
LEASE_KIND = b"LS"
_MUCH = 8 * 2**20
"""From so many bytes on, they are hashed by several threads."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The objects of a version that nobody sees yet."""

    head: str
    layers: str | None
    pack: str | None
    rows: Sequence[BlobRow]

    @property
    def keys(self) -> list[str]:
        """All of them."""
        return [key for key in (self.head, self.layers, self.pack) if key is not None]


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of the caller, and what they are known by."""

    data: memoryview
    digest: bytes
    mark: bytes


@contextmanager
def leased(keeper: Keeper, packs: Sequence[str]) -> Iterator[None]:
    """Keep every gc from removing these packs, if it has not begun to."""
    if not packs:
        yield
        return
    key = f"{LEASES}/{new_token()}"
    keeper.put(key, [framed_json(LEASE_KIND, {"packs": list(packs)})])
    try:
        yield
    finally:
        # One that stays keeps its packs for an hour, no more.
        with suppress(StorageError):
            keeper.remove([key])


def usable(keeper: Keeper, packs: Sequence[str]) -> set[str]:
    """Which packs, all of them leased, are there and not about to be removed."""
    condemned = {entry.key.split("/")[1] for entry in keeper.list(CONDEMNED)}
    # In this order: a gc takes its sign away only after it has removed the pack.
    rest = [pack for pack in packs if pack.rpartition("/")[2] not in condemned]
    there = side_by_side(lambda pack: _is_there(keeper, pack), rest)
    return {pack for pack, is_there in zip(rest, there, strict=True) if is_there}


def _is_there(keeper: Keeper, pack: str) -> bool:
    try:
        keeper.size(pack)
    except NotFound:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a save consists of, before anything is written."""

    model: NewModel
    sources: Mapping[bytes, Source]
    """The bytes of the caller, each once, by digest."""
    digests: Sequence[bytes | None]
    """Of each tensor; None for one without elements."""
    known: Mapping[bytes, BlobRow]
    """Where bytes lie that are there already, as far as this process knows."""

    @property
    def packs(self) -> list[str]:
        """The packs it would share."""
        return sorted({row.pack for row in self.known.values()})


def plan(model: NewModel, sources: Sequence[memoryview], blobs: Blobs) -> Plan:
    """Hash all bytes and see which of them are known.

    Raises:
        Gone: the manifest refers to a blob whose place is not known any more.
    """
    hashed = _hashed(sources)
    digests: list[bytes | None] = []
    known: dict[bytes, BlobRow] = {}
    for number in model.manifest.blobs:
        if number == NOTHING:
            digests.append(None)
            continue
        digest = hashed[-2 - number].digest if number < NOTHING else blobs[number].row.digest
        digests.append(digest)
        found = blobs.known(digest)
        if found is not None and digest not in known:
            blob = blobs[found]
            if blob.spots:
                pack, start = blob.spots[0]
                known[digest] = replace(blob.row, pack=pack, start=start)
    mine = {one.digest: one for one in hashed}
    return Plan(model=model, sources=mine, digests=digests, known=known)


def write(keeper: Keeper, todo: Plan, shared: set[str], durability: Durability) -> Written:
    """Write what is new; nobody sees any of it before there is an event.

    Raises:
        Gone: bytes that the caller has not given are in none of the shared packs.
    """
    rows = {d: row for d, row in todo.known.items() if row.pack in shared}
    wanted = dict.fromkeys(d for d in todo.digests if d is not None and d not in rows)
    if any(digest not in todo.sources for digest in wanted):
        raise Gone("a tensor that was to be shared with another model was removed meanwhile")
    new = [todo.sources[digest] for digest in wanted]
    pack = new_key() if new else None
    starts, nbytes = lay_out([len(one.data) for one in new])
    if pack is not None:
        for one, start in zip(new, starts, strict=True):
            rows[one.digest] = BlobRow(pack, start, len(one.data), one.digest, one.mark)
    order = {digest: n for n, digest in enumerate(rows)}
    blobs = tuple(NOTHING if d is None else order[d] for d in todo.digests)
    model = todo.model.with_blobs(blobs)
    head = Head(manifest=model.manifest, rows=list(rows.values()), configs=model.configs)
    token = new_token()
    made = Written(
        head=sharded(HEADS, token),
        layers=sharded(LAYERS, token) if model.layers else None,
        pack=pack,
        rows=head.rows,
    )
    try:
        if pack is not None:
            with keeper.begin(pack, nbytes, durability=durability) as draft:
                draft.write_parts(pieces(starts, [one.data for one in new]))
                draft.publish()
        keeper.put(made.head, [head.encode()], durability=durability)
        if made.layers is not None:
            keeper.put(made.layers, [encode_layers(model.layers)], durability=durability)
    except BaseException:
        forget(keeper, made)
        raise
    return made


def forget(keeper: Keeper, made: Written) -> None:
    """Remove what no event refers to; what cannot be removed now is left to gc."""
    try:
        keeper.remove(made.keys)
    except StorageError as error:
        log.warning("a save that failed leaves its bytes to gc: %s", error)


def _hashed(sources: Sequence[memoryview]) -> list[Source]:
    def one(data: memoryview) -> Source:
        return Source(data, digest_of(data), mark_of(data))

    if sum(map(len, sources)) < _MUCH or len(sources) < 2:
        return [one(data) for data in sources]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "sapwood-hash") as pool:
        return list(pool.map(one, sources))
