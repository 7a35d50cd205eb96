"""The provider's side of ``read_part`` and ``map_part``: bytes go out from where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from sapwood.channel.connection import Connection
from sapwood.errors import CannotMap, Damaged, Gone, NotFound, SapwoodError, StoreError
from sapwood.repository.catalog import Place
from sapwood.repository.providers.base import PartRange, VersionKey
from sapwood.repository.providers.local import LocalProvider
from sapwood.repository.providers.parts import size_of
from sapwood.repository.providers.placement import KEY_BYTES
from sapwood.repository.providers.rights import Rights
from sapwood.repository.providers.wire import join, send, table_rows
from sapwood.storage import Descriptor, Shareable

__all__ = ["MAPPED", "map_part", "send_part"]

_SMALL = 256 * 2**10
"""Smaller ranges are collected before they are sent; larger ones are sent without a copy."""
_COLLECTED = 4 * 2**20
_FILES = 64
"""Packs that are open for one request; of more, bytes are read and copied."""
_TRIES = 3
MAPPED = np.dtype([("key", "<u4"), ("file", "<u4"), ("start", "<u8")])
"""A row of an answer to ``map_part``: which key, in which descriptor, and where."""
Row = tuple[bytes, int, int]


def send_part(
    connection: Connection, provider: LocalProvider, version: VersionKey, body: Sequence[bytes]
) -> None:
    """Answer with the indices of ranges that are not here, and the bytes of the others."""
    if len(body) != 1:
        raise StoreError("a request for bytes has one table of ranges")
    rows = table_rows(body[0])
    for key, start, nbytes in rows:
        if start + nbytes > size_of(key):
            raise Damaged(
                f"a tensor of {size_of(key)} bytes was asked for {start} to {start + nbytes}"
            )
    with ExitStack() as stack:
        places, files = _opened(provider, version, {key for key, *_ in rows}, stack, rows)
        missing = [index for index, row in enumerate(rows) if row[0] not in places]
        found = [row for row in rows if row[0] in places]
        total = sum(nbytes for _, _, nbytes in found)
        send(
            connection,
            {"missing": len(missing), "nbytes": total},
            join([np.array(missing, "<u4").tobytes()]),
        )
        try:
            if files:
                _send_files(connection, found, places, files)
            else:
                _send_copies(connection, provider, version, found)
        except SapwoodError as error:
            # Bytes are awaited now: the client hears of it by the end of the connection.
            raise BrokenPipeError(f"a part could not be sent to its end: {error}") from error


def _opened(
    provider: LocalProvider,
    version: VersionKey,
    keys: set[bytes],
    stack: ExitStack,
    rows: Sequence[Row],
) -> tuple[dict[bytes, Place], dict[str, Descriptor]]:
    """Where tensors lie, and open packs, where that is worth it: what is open cannot be moved."""
    for attempt in range(_TRIES):
        places = provider.parts_here.places(version, keys)
        packs = {place.pack for place in places.values()}
        large = sum(nbytes for _, _, nbytes in rows) > _COLLECTED
        keeper = provider.parts_here.backend.keeper
        if not large or len(packs) > _FILES or not isinstance(keeper, Shareable):
            return places, {}
        with ExitStack() as opening:
            files = {}
            try:
                for pack in packs:
                    files[pack] = keeper.descriptor(pack)
                    opening.callback(os.close, files[pack].fd)
            except CannotMap:
                return places, {}
            except NotFound:
                if attempt == _TRIES - 1:
                    raise
                continue
            stack.enter_context(opening.pop_all())
            _check_whole(places, files)
            return places, files
    raise AssertionError  # never: the loop returns or raises


def _check_whole(places: dict[bytes, Place], files: dict[str, Descriptor]) -> None:
    for place in places.values():
        if place.start + place.nbytes > files[place.pack].nbytes:
            raise Damaged(f"pack {place.pack} is truncated; run verify")


def _send_files(
    connection: Connection,
    rows: Sequence[Row],
    places: dict[bytes, Place],
    files: dict[str, Descriptor],
) -> None:
    small = bytearray()
    for key, start, nbytes in rows:
        place = places[key]
        file = files[place.pack]
        at = file.offset + place.start + start
        if nbytes < _SMALL:
            small += _whole(file.fd, nbytes, at)
        if small and (nbytes >= _SMALL or len(small) >= _COLLECTED):
            connection.send_bytes(small)
            small = bytearray()
        if nbytes >= _SMALL:
            connection.send_range(file.fd, at, nbytes)
    connection.send_bytes(small)


def _whole(fd: int, nbytes: int, at: int) -> bytes:
    data = os.pread(fd, nbytes, at)
    if len(data) != nbytes:
        raise Damaged("a pack became shorter while it was read")
    return data


def _send_copies(
    connection: Connection, provider: LocalProvider, version: VersionKey, rows: Sequence[Row]
) -> None:
    for batch in _batches(rows):
        out = memoryview(bytearray(sum(nbytes for _, _, nbytes in batch)))
        ranges, at = [], 0
        for key, start, nbytes in batch:
            ranges.append(PartRange(key, start, out[at : at + nbytes]))
            at += nbytes
        if provider.read_part(version, ranges):
            raise Gone("a tensor was removed while it was sent")
        connection.send_bytes(out)


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Runs of ranges that are read at once; large ones are cut up."""
    batch: list[Row] = []
    nbytes = 0
    for key, start, size in rows:
        for at in range(start, start + size, _COLLECTED):
            some = min(_COLLECTED, start + size - at)
            if batch and nbytes + some > _COLLECTED:
                yield batch
                batch, nbytes = [], 0
            batch.append((key, at, some))
            nbytes += some
    if batch:
        yield batch


# -- memory that is passed -----------------------------------------------------------------------


def map_part(
    connection: Connection,
    provider: LocalProvider,
    rights: Rights,
    version: VersionKey,
    body: Sequence[bytes],
) -> None:
    """Answer with descriptors of packs, if the token may read everything that is in them."""
    if len(body) != 1 or len(body[0]) % KEY_BYTES:
        raise StoreError("a request for memory has one table of keys")
    keys = [body[0][at : at + KEY_BYTES] for at in range(0, len(body[0]), KEY_BYTES)]
    rows = [(key, 0, _COLLECTED + 1) for key in keys]
    with ExitStack() as stack:
        places, files = _opened(provider, version, set(keys), stack, rows)
        if (places and not files) or not _may_read_all(provider, rights, files):
            send(connection, {"mapped": False})
            return
        order = {pack: number for number, pack in enumerate(files)}
        found = [
            (index, order[places[key].pack], files[places[key].pack].offset + places[key].start)
            for index, key in enumerate(keys)
            if key in places
        ]
        fds = [file.fd for file in files.values()]
        table = join([np.array(found, MAPPED).tobytes()])
        send(connection, {"mapped": True, "files": len(fds)}, table, fds)


def _may_read_all(provider: LocalProvider, rights: Rights, files: dict[str, Descriptor]) -> bool:
    if rights.allows("read", "*"):
        return True
    owners = provider.parts_here.owners(files)
    # gc writes what is left of packs into new ones; whose bytes these hold is not known.
    return all(pack in owners and rights.allows("read", owners[pack]) for pack in files)
