"""Databases made and read by py-lmdb, the reference for everything here."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lmdb

from sapwood.data.index import Index

MAP = 2**28


def environment(path: Path, **options: Any) -> lmdb.Environment:
    settings = {"map_size": MAP, "subdir": False, "max_dbs": 8, "lock": False, "sync": False}
    return lmdb.open(str(path), **(settings | options))


def empty_file(path: Path, page_size: int) -> None:
    """A new database whose pages are not the machine's; LMDB keeps to what it finds."""
    with path.open("wb") as file:
        for number in (0, 1):
            free = struct.pack("<IHHQQQQQ", page_size, 8, 0, 0, 0, 0, 0, 2**64 - 1)
            main = struct.pack("<IHHQQQQQ", 0, 0, 0, 0, 0, 0, 0, 2**64 - 1)
            header = struct.pack("<QHHI", number, 0, 8, 0)
            meta = struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, MAP) + free + main
            file.write((header + meta + struct.pack("<QQ", 1, 0)).ljust(page_size, b"\0"))


def reference(path: Path, name: bytes | None = None) -> list[tuple[bytes, bytes]]:
    with environment(path, readonly=True) as env, env.begin() as txn:
        names = set(_names(path)) if name is None else set()
        db = env.open_db(name, txn=txn, create=False) if name is not None else None
        with txn.cursor(db) as cursor:
            return [(k, v) for k, v in cursor if k not in names]


def _names(path: Path) -> Iterable[bytes]:
    from sapwood.data.index import list_databases

    return list_databases(path)


def contents(index: Index) -> list[tuple[bytes, bytes]]:
    raw = index.file.read_bytes()
    columns = (index.key_offsets, index.key_lengths, index.offsets, index.lengths)
    return [
        (raw[k : k + n], raw[o : o + m])
        for k, n, o, m in zip(*(column.tolist() for column in columns), strict=True)
    ]


def numbered(count: int, size: Callable[[int], int], seed: int = 0) -> list[tuple[bytes, bytes]]:
    chance = random.Random(seed)
    return [(f"{n:08d}".encode(), chance.randbytes(size(n))) for n in range(count)]


def plain(path: Path, records: list[tuple[bytes, bytes]], commit: int = 100) -> None:
    with environment(path) as env:
        for first in range(0, len(records), commit):
            with env.begin(write=True) as txn:
                for key, value in records[first : first + commit]:
                    txn.put(key, value)
