"""What an LMDB file is made of: data version 1, 64 bit, little-endian.

Pages 0 and 1 are meta pages; the one of the later transaction counts. It names the roots of two
trees: the free pages, and the main database, whose records may name further databases.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sapwood.errors import DataError

__all__ = ["EMPTY", "Database", "Meta", "latest", "page_size_of", "read_database", "read_meta"]

MAGIC, VERSION = 0xBEEFC0DE, 1
EMPTY = 2**64 - 1
"""The root of a database without records."""
HEADER = 16
BRANCH, LEAF, OVERFLOW, META, FIXED = 1, 2, 4, 8, 0x20
"""Flags of pages; a leaf of ``FIXED`` size values has no nodes."""
BIG, SUB, DUP = 1, 2, 4
"""Flags of nodes: the value has pages of its own, is a database, or stands for several values."""
DUPSORT = 4
"""A flag of databases: a key may have several values."""
MAX_DEPTH = 32
_FURTHEST = 2**32
"""No meta page is this many transactions behind: nobody commits as often between two syncs, and a
flipped bit of a transaction number would make the older state count."""
META_BYTES = HEADER + 136
DATABASE_BYTES = 48

_PAGE = struct.Struct("<QHHI")
_META = struct.Struct("<IIQQ48s48sQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")


@dataclass(frozen=True, kw_only=True)
class Database:
    """One tree of a file."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @property
    def dupsort(self) -> bool:
        """Whether a key may have several values."""
        return bool(self.flags & DUPSORT)


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The state of a file after one transaction."""

    page_size: int
    txnid: int
    last_page: int
    free: Database
    main: Database


def read_database(raw: bytes) -> Database:
    """Take a tree's description apart."""
    pad, flags, depth, branches, leaves, overflows, entries, root = _DATABASE.unpack(raw)
    return Database(
        pad=pad,
        flags=flags,
        depth=depth,
        branches=branches,
        leaves=leaves,
        overflows=overflows,
        entries=entries,
        root=root,
    )


def page_size_of(raw: bytes) -> int:
    """The page size, from the first bytes of a file.

    Raises:
        DataError: the file is not LMDB, or not of the kind read here.
    """
    if len(raw) < META_BYTES:
        raise DataError(f"page 0: expected a meta page, and the file has only {len(raw)} bytes")
    _refuse_other_kinds(raw)
    size = read_database(_META.unpack_from(raw, HEADER)[4]).pad
    if not 256 <= size <= 32768 or size & (size - 1):
        raise DataError(
            f"page 0: expected a page size that is a power of two from 256 to 32768, found {size}"
        )
    return size


def _refuse_other_kinds(raw: bytes) -> None:
    magic, version = struct.unpack_from("<II", raw, HEADER)
    if magic == MAGIC and version == VERSION:
        return
    little, big = struct.pack("<I", MAGIC), struct.pack(">I", MAGIC)
    if magic == MAGIC or raw[24:28] == little:
        found = version if magic == MAGIC else struct.unpack_from("<I", raw, 28)[0]
        raise DataError(
            f"page 0: expected LMDB data version {VERSION}, found {found}; copy it with "
            "mdb_dump and mdb_load of LMDB 0.9"
        )
    if raw[12:16] == little:
        raise DataError("page 0: expected a 64-bit LMDB file, found one of a 32-bit machine")
    if big in (raw[12:16], raw[16:20]):
        raise DataError("page 0: expected a little-endian LMDB file, found a big-endian one")
    raise DataError(f"page 0: expected LMDB's mark 0x{MAGIC:08x} at byte 16, found 0x{magic:08x}")


def read_meta(raw: bytes, number: int, page_size: int) -> Meta:
    """Take a meta page apart.

    Raises:
        DataError: it is not one, or it cannot be true.
    """
    if len(raw) < META_BYTES:
        raise DataError(f"page {number}: expected a meta page, and the file ends there")
    at, _, flags, _ = _PAGE.unpack_from(raw)
    magic, version, _, _, free, main, last_page, txnid = _META.unpack_from(raw, HEADER)
    if (at, flags, magic, version) != (number, META, MAGIC, VERSION):
        raise DataError(
            f"page {number}: expected a meta page of this number, found number {at}, flags "
            f"0x{flags:x}, mark 0x{magic:08x} and version {version}"
        )
    if read_database(free).pad != page_size:
        raise DataError(
            f"page {number}: expected the page size {page_size}, found {read_database(free).pad}"
        )
    return Meta(
        page_size=page_size,
        txnid=txnid,
        last_page=last_page,
        free=read_database(free),
        main=read_database(main),
    )


def latest(first: Meta, second: Meta) -> Meta:
    """The meta page that counts, chosen as LMDB does: that of the later transaction.

    Transactions write the two in turn, so that they are mostly one apart. After a crash of a
    machine that wrote without syncing, only one of them may have reached the disk, and the other
    is any number of transactions behind.

    Raises:
        DataError: no such transactions can have been written to these pages.
    """
    even, odd = first.txnid, second.txnid
    fresh = even == odd == 0
    if not fresh and (even % 2 != 0 or odd % 2 != 1 or abs(even - odd) > _FURTHEST):
        raise DataError(
            "pages 0 and 1: expected an even and an odd transaction that can follow each other, "
            f"found {even} and {odd}; one is damaged"
        )
    return first if even >= odd else second
