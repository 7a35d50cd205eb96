"""Where every record of a database is in its file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sapwood.data.check import database_name, require_bool, require_callable
from sapwood.data.free import free_pages
from sapwood.data.layout import DUPSORT, HEADER, OVERFLOW, Database
from sapwood.data.leaves import Found
from sapwood.data.pagefile import Fingerprint, PageFile, open_pages
from sapwood.data.pages import gather
from sapwood.data.walk import Walk
from sapwood.errors import DataError

__all__ = ["Index", "build_index", "list_databases"]


@dataclass(frozen=True, kw_only=True)
class Index:
    """Offsets and lengths of all values and keys of one database, in the order of keys.

    Nothing of the values is in memory; they are read from ``file`` where the index says.
    """

    file: Path
    database: bytes | None
    """The name of a named database; None is the main one."""
    flags: int
    """LMDB's flags of the database."""
    fingerprint: Fingerprint
    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    key_offsets: NDArray[np.int64]
    key_lengths: NDArray[np.uint16]

    def __len__(self) -> int:
        """How many records there are; each value of a key with several is one."""
        return len(self.offsets)

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self.fingerprint.page_size

    @cached_property
    def width(self) -> int | None:
        """The length of every value, if all have the same."""
        if not len(self) or self.lengths.min() != self.lengths.max():
            return None
        return int(self.lengths[0])

    def lengths_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths of some values."""
        if self.width is not None:
            return _constant(self.width, len(records).bit_length())[: len(records)]
        return self.lengths[records].astype(np.int64)

    def take(self, records: NDArray[np.int64]) -> Index:
        """The places of some records, in this order."""
        names = ("offsets", "lengths", "key_offsets", "key_lengths")
        return replace(self, **{name: getattr(self, name)[records] for name in names})

    @property
    def overflow(self) -> NDArray[np.bool_]:
        """Which values have pages of their own; their page's header is right before them."""
        if self.flags & DUPSORT:
            return np.zeros(len(self), np.bool_)
        found: NDArray[np.bool_] = self.offsets % self.page_size == HEADER
        return found


@lru_cache(maxsize=64)
def _constant(value: int, bits: int) -> NDArray[np.int64]:
    """Many times the same number; it is asked for again with every batch."""
    found = np.full(1 << bits, value, np.int64)
    found.flags.writeable = False
    return found


def build_index(
    path: str | os.PathLike[str],
    database: str | bytes | None = None,
    *,
    thorough: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Index:
    """Walk a database: its branch and leaf pages are read, and the list of free pages.

    LMDB has no checksums. What its structure cannot tell goes unnoticed: a flipped bit inside of a
    key or a value, or in the length of a value as long as that still needs the same pages.

    ``thorough`` also reads the header of every value that has pages of its own: it notices a leaf
    that leads to the wrong page, and costs one read for each such value.
    ``progress`` is called with bytes as they have been read.

    Raises:
        ConfigError: an argument is of a wrong type.
        DataError: it is damaged, of an unknown kind, has no such database, or was changed
            meanwhile.
    """
    name = database_name(database)
    require_bool("thorough", thorough)
    require_callable("progress", progress)
    with open_pages(path) as file:
        file.progress = progress
        try:
            wanted = file.meta.main if name is None else _find(file, name)
            walk = Walk(file)
            found, _ = walk.records(wanted, names=name is None)
            walk.require_not_free(free_pages(file))
            index = _index(file, name, wanted, found)
            if thorough:
                _check_headers(file, index)
        except DataError:
            file.check_unchanged()  # what seemed damaged may have been written meanwhile
            raise
        file.check_unchanged()
    return index


def list_databases(path: str | os.PathLike[str]) -> dict[bytes, Database]:
    """The named databases of a file.

    Raises:
        DataError: as ``build_index``.
    """
    with open_pages(path) as file:
        _, named = Walk(file).records(file.meta.main, names=True)
        file.check_unchanged()
    return named


def _find(file: PageFile, name: bytes) -> Database:
    _, named = Walk(file).records(file.meta.main, names=True)
    if name not in named:
        known = ", ".join(repr(one.decode(errors="replace")) for one in sorted(named)[:10])
        raise DataError(
            f"there is no database {name.decode(errors='replace')!r}; "
            + (f"it has {known}" if known else "it has only the main one")
        )
    return named[name]


def _index(file: PageFile, name: bytes | None, database: Database, found: Found) -> Index:
    return Index(
        file=file.path,
        database=name,
        flags=database.flags,
        fingerprint=file.fingerprint,
        offsets=found.offset,
        lengths=found.size.astype(np.uint32),
        key_offsets=found.key,
        key_lengths=found.key_size.astype(np.uint16),
    )


def _check_headers(file: PageFile, index: Index) -> None:
    """Every overflow page must bear its number, its flag, and enough pages for its value."""
    chosen = np.flatnonzero(index.overflow)
    numbers = index.offsets[chosen] // index.page_size
    needed = (HEADER - 1 + index.lengths[chosen].astype(np.int64)) // index.page_size + 1
    for places, pages in file.batches(numbers):
        raw = gather(pages.flat, pages.base, HEADER, "<u4").astype(np.int64)
        ok = (raw[:, 0] | raw[:, 1] << 32) == pages.number
        pages.require(ok, "its own number at byte 0")
        pages.require(raw[:, 2] >> 16 == OVERFLOW, f"the page flag 0x{OVERFLOW:x}")
        pages.require(raw[:, 3] >= needed[places], "as many pages as its value needs")
