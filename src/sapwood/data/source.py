"""A database that is open for reading records, by those who know where they are."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from sapwood.data.index import Index
from sapwood.data.layout import META_BYTES
from sapwood.data.pagefile import PageFile
from sapwood.errors import DataError
from sapwood.regular import open_regular

__all__ = ["ALIGN", "FileMap", "Source"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_LIBC.process_vm_writev.restype = ctypes.c_ssize_t
_POPULATE_READ = 22
_SCRATCH = 2**20
_SPANS = 1024
"""The most pieces of memory that one call copies."""

ALIGN = 4096
"""Reads that pass by the page cache begin and end on multiples of this, in memory and on disk."""


class FileMap:
    """A mapping of a file that outlives those who use it.

    Pages that were touched once need not be found again in the next epoch.
    """

    def __init__(self) -> None:
        """There is none yet."""
        self._key: tuple[int, int, int] | None = None
        self._map: mmap.mmap | None = None

    def of(self, fd: int, size: int) -> mmap.mmap:
        """The whole file of a descriptor.

        Raises:
            OSError: there is no address space for it.
        """
        facts = os.fstat(fd)
        key = facts.st_dev, facts.st_ino, size
        if self._map is None or key != self._key:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._key = key
        return self._map

    def drop(self) -> None:
        """Forget it; memory in use stays."""
        self._key = self._map = None


class Source:
    """The bytes of a database, as long as nobody writes to it.

    No lock is taken. A writer leaves the pages of our transaction alone until it has committed the
    next one, and each commit changes a meta page. So bytes are right if the meta pages are still
    the same after they were read, which ``check`` makes sure of.
    """

    def __init__(self, index: Index, maps: FileMap | None = None) -> None:
        """Open the file; ``maps`` is for its mapping.

        Raises:
            DataError: it cannot be read, or is not in the state of which the index is.
        """
        self.path, self._page_size = index.file, index.page_size
        self.fd, self._direct = -1, -1
        self._maps = FileMap() if maps is None else maps
        self._memory: Bytes | None = None
        try:
            self.fd = open_regular(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be opened: {error}") from error
        try:
            now = PageFile(self.path, self.fd).fingerprint
            self._metas = self._read_metas()
        except (DataError, OSError) as error:
            self.close()
            raise DataError(f"{self.path}: {error}") from error
        if now != index.fingerprint:
            self.close()
            raise DataError(
                f"{self.path}: the database is at transaction {now.txnid}, and the index is of "
                f"{index.fingerprint.txnid}; make a new reader, which makes a new index"
            )
        self.size = now.size

    def _read_metas(self) -> tuple[bytes, int, int]:
        """Both meta pages, which follow each other, and how long and how old the file is.

        Its age, as another database that was copied over it may have the same meta pages.
        """
        metas, facts = os.pread(self.fd, self._page_size + META_BYTES, 0), os.fstat(self.fd)
        return metas, facts.st_size, facts.st_mtime_ns

    def check(self) -> None:
        """Raise if somebody has written since the file was opened.

        Raises:
            DataError: it was changed, so what was read last may be wrong.
        """
        try:
            same = self._read_metas() == self._metas
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error}") from error
        if not same:
            raise DataError(
                f"{self.path}: the database was changed while it was read; make a new reader when "
                "nobody writes to it"
            )

    def direct(self) -> int:
        """A descriptor that passes by the page cache.

        Some file systems cannot; there the page cache is used, and may grow.
        """
        if self._direct >= 0:
            return self._direct
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return self.fd
        try:
            with mmap.mmap(-1, ALIGN) as probe:
                os.preadv(fd, [probe], 0)
        except OSError:
            os.close(fd)
            return self.fd
        self._direct = fd
        return fd

    def mapped(self) -> NDArray[np.uint8]:
        """The whole file as memory; pages are read when they are touched.

        Raises:
            DataError: there is no address space for it.
        """
        try:
            if self._memory is None:
                self._memory = np.frombuffer(self._maps.of(self.fd, self.size), np.uint8)
            return self._memory
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be mapped: {error}") from error

    def gather(self, offsets: Ints, lengths: Ints) -> Bytes:
        """The bytes at these offsets, one after the other, out of the file as it is mapped.

        The system copies them. To touch a page of a mapped file that somebody has cut off ends the
        process (SIGBUS), and no check before could rule that out; a system call only fails, and
        then the bytes are read from the file, which says what is wrong.

        Raises:
            DataError: the file ends before, or the disk failed.
        """
        out = np.empty(int(lengths.sum()), np.uint8)
        spans = np.empty((len(offsets), 2), np.uint64)
        spans[:, 0], spans[:, 1] = offsets + _address(self.mapped()), lengths
        ends = np.cumsum(lengths)
        whole, at = np.empty(2, np.uint64), 0
        for first in range(0, len(offsets), _SPANS):
            last = min(first + _SPANS, len(offsets))
            end = int(ends[last - 1])
            whole[0], whole[1] = _address(out) + at, end - at
            copied = _LIBC.process_vm_writev(
                os.getpid(), _address(spans[first:last]), last - first, _address(whole), 1, 0
            )
            if copied != end - at:
                self._read_each(out[at:end], offsets[first:last], lengths[first:last])
            at = end
        return out

    def _read_each(self, out: Bytes, offsets: Ints, lengths: Ints) -> None:
        view, at = memoryview(out), 0  # type: ignore[arg-type]
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            self.read_into(self.fd, view[at : at + length], offset, length)
            at += length

    def read_into(self, fd: int, buffer: memoryview, offset: int, needed: int) -> None:
        """Fill a buffer; after ``needed`` bytes the file may end.

        Raises:
            DataError: it ended before, or the disk failed.
        """
        done = 0
        while done < needed:
            try:
                count = os.preadv(fd, [buffer[done:]], offset + done)
            except OSError as error:
                why = errno.errorcode.get(error.errno or 0, "?")
                raise DataError(
                    f"{self.path}: page {(offset + done) // self._page_size}: cannot be read: "
                    f"{why}: {error}"
                ) from error
            if count == 0:
                raise DataError(
                    f"{self.path}: page {(offset + done) // self._page_size}: the file ends there, "
                    f"and {needed - done} more bytes were expected; it was cut off"
                )
            done += count
            fd = self.fd  # what is left begins at a place that need not be aligned

    def advise(self, low: int, high: int) -> None:
        """Say that these bytes will be read soon."""
        with suppress(OSError):  # it is only a hint
            os.posix_fadvise(self.fd, low, high - low, os.POSIX_FADV_WILLNEED)

    def bring(self, memory: NDArray[np.uint8], low: int, high: int) -> None:
        """Have the system read these bytes to where they are ``mapped``, and wait until it has.

        Raises:
            DataError: the file ends before, or the disk failed.
        """
        self.advise(low, high)  # all of it at once, so that requests are large
        start = low // mmap.PAGESIZE * mmap.PAGESIZE
        # Python's own madvise would keep all other threads waiting.
        if not _LIBC.madvise(memory.ctypes.data + start, high - start, _POPULATE_READ):
            return
        scratch = memoryview(bytearray(_SCRATCH))  # an old system, or an error: reading will tell
        for at in range(low, high, _SCRATCH):
            size = min(_SCRATCH, high - at)
            self.read_into(self.fd, scratch[:size], at, size)

    def resident(self, probes: int = 64) -> float:
        """About which part of the file is in the page cache.

        A page that is not there is fetched for having been asked for, with others after it unless
        that is forbidden; and it must not be asked for again, by this process or another.
        """
        found, byte = 0, bytearray(1)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for at in np.random.default_rng().integers(self.size, size=probes).tolist():
                with suppress(BlockingIOError):
                    found += os.preadv(fd, [byte], at, os.RWF_NOWAIT)
        except OSError:  # a file system that cannot tell
            return 0.0
        finally:
            os.close(fd)
        return found / probes

    def close(self) -> None:
        """Close the file; memory given out by ``mapped`` stays."""
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def __del__(self) -> None:
        """An iterator that was left in the middle is closed when it is collected."""
        self.close()


def _address(array: NDArray[np.generic]) -> int:
    """Where an array is; the way numpy offers with ``ctypes`` takes several times as long."""
    found: int = array.__array_interface__["data"][0]
    return found
