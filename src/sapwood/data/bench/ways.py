"""Ways to read a database that are compared; each says what it has read as it goes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Protocol

import numpy as np

from sapwood.data.engines.base import MIB
from sapwood.data.index import Index
from sapwood.data.layout import DUPSORT
from sapwood.data.reader import LmdbReader
from sapwood.data.source import Source

__all__ = ["Cursor", "Disk", "Lookups", "Reader", "Way"]

Read = Generator[tuple[int, int], None, None]
"""Records and bytes, after each batch."""

_SAMPLED = 50_000


class Way(Protocol):
    """One way to read."""

    name: str

    def epoch(self) -> Read:
        """Read everything once, or until it is closed; afterwards no file is open."""
        ...


class Reader:
    """Our reader with one policy."""

    def __init__(self, policy: str, reader: LmdbReader) -> None:
        """``reader`` is left where it is in its epochs."""
        self.name = f"sapwood {policy}"
        self._reader = reader

    def epoch(self) -> Read:
        """One epoch; the next one has another order."""
        self._reader.set_epoch(self._reader.epoch)
        with closing(self._reader):
            for batch in self._reader:
                yield len(batch), batch.data.nbytes


class Cursor:
    """A cursor of py-lmdb from the first key to the last, each value as bytes."""

    name = "py-lmdb cursor"

    def __init__(self, lmdb: Any, index: Index, batch: int) -> None:
        """Nothing is opened yet."""
        self._lmdb, self._index, self._batch = lmdb, index, batch

    def epoch(self) -> Read:
        """Step by step."""
        with ExitStack() as stack:
            txn, db = _begin(self._lmdb, self._index, stack)
            cursor = stack.enter_context(closing(txn.cursor(db)))
            # A training has the values of a batch in memory together, and so has this.
            batch: list[bytes] = []
            for value in cursor.iternext(keys=False):
                batch.append(value)
                if len(batch) == self._batch:
                    yield _size(batch)
                    batch = []
            yield _size(batch)


class Lookups:
    """Values by key, in any order: what a sampler of torch's DataLoader makes py-lmdb do."""

    name = "py-lmdb get"

    def __init__(self, lmdb: Any, index: Index, batch: int, seed: int) -> None:
        """Draw records, and read their keys."""
        self._lmdb, self._index, self._batch = lmdb, index, batch
        drawn = np.random.default_rng(seed).permutation(len(index))[:_SAMPLED]
        with closing(Source(index)) as source:
            self._keys = [
                os.pread(source.fd, size, offset)
                for offset, size in zip(
                    index.key_offsets[drawn].tolist(),
                    index.key_lengths[drawn].tolist(),
                    strict=True,
                )
            ]

    def epoch(self) -> Read:
        """Key after key."""
        with ExitStack() as stack:
            txn, db = _begin(self._lmdb, self._index, stack)
            for first in range(0, len(self._keys), self._batch):
                keys = self._keys[first : first + self._batch]
                yield _size([txn.get(key, db=db) for key in keys])


class Disk:
    """The file from its beginning to its end, past the page cache, in large pieces."""

    name = "raw disk"
    _piece = MIB

    def __init__(self, index: Index, threads: int = 2) -> None:
        """As many requests in flight as a reader has."""
        self._index, self._threads = index, threads

    def epoch(self) -> Read:
        """Piece after piece; there are no records in it."""
        with (
            closing(Source(self._index)) as source,
            ThreadPoolExecutor(self._threads, "sapwood-bench") as pool,
        ):
            buffers = [mmap.mmap(-1, self._piece) for _ in range(self._threads)]
            fd = source.direct()
            flying: list[Future[int]] = []
            for number, offset in enumerate(range(0, source.size, self._piece)):
                if len(flying) == self._threads:
                    yield 0, flying.pop(0).result()
                buffer = buffers[number % self._threads]
                flying.append(pool.submit(os.preadv, fd, [buffer], offset))
            for last in flying:
                yield 0, last.result()


def _size(batch: list[bytes]) -> tuple[int, int]:
    return len(batch), sum(map(len, batch))


def _begin(lmdb: Any, index: Index, stack: ExitStack) -> tuple[Any, Any]:
    env = stack.enter_context(
        lmdb.open(str(index.file), subdir=False, readonly=True, lock=False, max_dbs=1)
    )
    db = None if index.database is None else env.open_db(index.database, create=False)
    return stack.enter_context(env.begin()), db


def peer(lmdb: Any, index: Index, batch: int, shuffle: str, seed: int) -> Way:
    """How py-lmdb is used for an order."""
    if shuffle == "none" or index.flags & DUPSORT:
        return Cursor(lmdb, index, batch)
    return Lookups(lmdb, index, batch, seed)
