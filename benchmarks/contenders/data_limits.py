"""The limits: the same bytes from the disk, or from the page cache, and nothing done with them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from .data_reading import Reading

CHUNK, THREADS = 2**20, 2
"""As our own reader has them by default."""


class RawDisk(Reading):
    """``O_DIRECT`` reads of the whole database file, one after the other."""

    flags = os.O_RDONLY | os.O_DIRECT

    def batches(self) -> Iterator[int]:
        task = self.task
        fd = os.open(task.database, self.flags)
        size = os.fstat(fd).st_size
        chunks = range(-(-size // CHUNK))[task.rank :: task.world]
        buffers = [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]

        def every(thread: int) -> None:
            for chunk in chunks[thread::THREADS]:
                os.preadv(fd, [buffers[thread]], chunk * CHUNK)

        try:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(every, range(THREADS)))
        finally:
            os.close(fd)
        yield len(range(task.count)[task.rank :: task.world])

    def count(self, batch: int) -> int:
        return batch

    def records(self, batch: int) -> list[bytes]:
        return []  # it has bytes, and does not know of records: a limit is not checked


class PageCache(RawDisk):
    """The same reads, of a file that is in the page cache: each byte is copied once."""

    flags = os.O_RDONLY


READINGS = {"raw disk": RawDisk, "page cache": PageCache}
