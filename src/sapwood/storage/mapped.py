"""Bytes of an object where they lie."""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["Mapped", "map_file"]


class Mapped:
    """The bytes of an object, without a copy; close it when they are not needed any more.

    Arrays made from ``data`` stay valid after ``close``: the memory goes with the last of them. A
    file that somebody else makes shorter meanwhile ends the process that reads behind its end
    (SIGBUS); keepers never do that.
    """

    def __init__(self, data: memoryview, memory: mmap.mmap | None = None) -> None:
        """Made by keepers."""
        self.data = data
        self._memory = memory

    def close(self) -> None:
        """Give it back; calling it again does nothing."""
        data, self.data = self.data, memoryview(b"")
        # A caller still holds arrays of it: the memory goes with the last of them.
        with suppress(BufferError):
            data.release()
            if self._memory is not None:
                self._memory.close()
        self._memory = None

    def __enter__(self) -> Mapped:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def map_file(fd: int, nbytes: int, *, writable: bool) -> Mapped:
    """The first bytes of a file; the descriptor stays the caller's. Raises ``OSError``."""
    if not nbytes:  # which cannot be mapped
        return Mapped(memoryview(bytearray() if writable else b""))
    # Private even where nothing is written: a sealed memfd can be mapped in no other way before
    # Linux 6.7, and the pages are the same.
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=protection)
    return Mapped(memoryview(memory), memory)
