"""Maps descriptors into memory, and faults pages in before they are used.

Python's ``mmap`` cannot place a mapping, keeps a second descriptor for each, and holds the GIL for
as long as MAP_POPULATE takes: 150 ms for 256 MiB. A mapping made here ends with its last array.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HUGE_PAGE", "PAGE", "Access", "Mapping", "round_up"]

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 * 2**20
_STRIDE = 32 * HUGE_PAGE
"""Given to the kernel at a time, which then waits for all cores once: smaller is slower."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_COLLAPSE = 25

# use_errno: the errno of these calls, not what Python's own calls leave there in between.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Access(Enum):
    """What a mapping may do to the bytes: its protection and its flags."""

    WRITE = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    READ = (mmap.PROT_READ, mmap.MAP_SHARED)
    COPY = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE)
    """Writable, and a page that is written to becomes this mapping's own."""


class Mapping:
    """A descriptor's first bytes in memory, on a huge page's boundary.

    It is unmapped when neither it nor an array or memory view of ``bytes`` is left: there is no
    way to unmap memory under somebody who reads it.
    """

    def __init__(self, fd: int, nbytes: int, access: Access = Access.WRITE) -> None:
        """The descriptor is not kept.

        Raises:
            OSError: as the system gives it.
        """
        length = max(round_up(nbytes, PAGE), PAGE)
        self.address = _map(fd, length, access)
        self.nbytes = nbytes
        exporter = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self._range = _Range(self.address, length)
        # At exit other threads may still read; the system unmaps it all a moment later.
        weakref.finalize(exporter, self._range.unmap).atexit = False
        self.bytes: Bytes = np.frombuffer(memoryview(exporter), np.uint8)
        if access is Access.READ:
            self.bytes.flags.writeable = False

    def keep_from_children(self) -> None:
        """Leave it out of processes forked from this one: touching it there is a SIGSEGV."""
        self._range.owner = os.getpid()
        _check(_libc.madvise(self.address, self._range.length, mmap.MADV_DONTFORK))

    def make_private(self, fd: int) -> None:
        """In a forked child: reads go on, and writes no longer reach the processes that share it.

        Raises:
            OSError: as the system gives it.
        """
        try:
            _map_at(self.address, fd, self._range.length, Access.COPY)
        except OSError:
            # Better a SIGSEGV here than a write that reaches the others.
            _libc.munmap(self.address, self._range.length)
            raise

    def fault_in(self, fd: int, start: int, stop: int, *, huge: bool = True) -> int:
        """Give ``start`` to ``stop`` pages, zeroed and mapped; how much of it is in huge pages.

        Others may use the rest of the mapping meanwhile; the GIL is not held.

        Raises:
            OSError: there is no memory left.
        """
        found = 0
        for at in range(start, stop, _STRIDE):
            end = min(at + _STRIDE, stop)
            if huge and at % HUGE_PAGE == 0 and (whole := (end - at) // HUGE_PAGE * HUGE_PAGE):
                if self._collapse(at, whole):
                    found += whole
                    at += whole
                else:
                    huge = False
            if at < end:
                # Without this a full system would answer the touch below with SIGBUS.
                os.posix_fallocate(fd, at, end - at)
                # Reading maps nothing for writing; nobody has an array of these pages yet.
                self.bytes[at:end:PAGE] = 0
        return found

    def _collapse(self, at: int, nbytes: int) -> bool:
        """Make whole huge pages of it: 128 faults per 256 MiB where there would be 65536.

        That takes a third of the time, and the first touch in every other process a tenth. Unlike
        MADV_HUGEPAGE it does not ask /sys/kernel/mm/transparent_hugepage/shmem_enabled, which is
        "never" on most machines. Each huge page needs one page to begin with.
        """
        self.bytes[at : at + nbytes : HUGE_PAGE] = 0
        return bool(_libc.madvise(self.address + at, nbytes, _MADV_COLLAPSE) == 0)


class _Range:
    """What is to be unmapped; apart from the mapping, which its own finalizer must not hold."""

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length
        self.owner: int | None = None

    def unmap(self) -> None:
        # A forked child that was given no mapping may have something else at this address by now.
        if self.owner in (None, os.getpid()):
            _libc.munmap(self.address, self.length)


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-nbytes // unit) * unit


def _map(fd: int, length: int, access: Access) -> int:
    # The kernel puts a memfd anywhere. Huge pages need the same offset in one as in the file.
    room = length + HUGE_PAGE
    found = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    _check(-1 if found == _FAILED else 0)
    begin = round_up(found, HUGE_PAGE)
    try:
        _map_at(begin, fd, length, access)
    except BaseException:
        _libc.munmap(found, room)
        raise
    if begin > found:
        _libc.munmap(found, begin - found)
    _libc.munmap(begin + length, found + room - begin - length)
    return begin


def _map_at(address: int, fd: int, length: int, access: Access) -> None:
    protection, flags = access.value
    found = _libc.mmap(address, length, protection, flags | _MAP_FIXED, fd, 0)
    _check(-1 if found == _FAILED else 0)


def _check(result: Any) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
