"""The page cache of some files: dropped, filled, and looked at."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 8 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)


def files_of(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if path.stat().st_size]


def resident(path: Path) -> float:
    """The part of a file's pages that is in memory, as the kernel says (mincore)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector):
            raise OSError(ctypes.get_errno(), "mincore")
    return bytes(vector).translate(_LOWEST_BIT).count(1) / pages


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def drop(folder: Path) -> float:
    """Drops what is cached of the files; the largest part that stayed all the same."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return max(map(resident, files_of(folder)), default=0.0)


def pieces(path: Path) -> Iterator[int]:
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield count


def fill(folder: Path) -> float:
    """Reads what is not cached; the smallest part that is then."""
    for path in files_of(folder):
        if resident(path) < 1:
            for _ in pieces(path):
                pass
    return min(map(resident, files_of(folder)), default=1.0)
