"""A piece of shared memory without a name: it lives as long as a process holds its descriptor.

Nothing is left behind in /dev/shm, whoever is killed; a process that was given the descriptor keeps
the bytes when the one that wrote them is gone.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.buffers.mapping import Mapping

__all__ = ["Arena"]


class Arena:
    """Shared memory, mapped and touched, so that writing to it never faults.

    The mapping keeps its size; ``write_at`` makes the memory longer, ``mapped_anew`` shows that.
    """

    def __init__(self, nbytes: int, *, label: str = "staging", touch: bool = True) -> None:
        """Make new memory; ``label`` shows in /proc/self/maps.

        ``touch=False`` leaves pages to whoever writes them first, and so to that one's NUMA node.
        """
        fd = os.memfd_create(f"sapwood-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(nbytes, 1))
            # Whoever shrank it would kill every other process that reads past the new end; growing
            # harms nobody, and what is behind the tensors of a step has no fixed size.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            mapping = Mapping(fd, nbytes)
            if touch:
                mapping.fault_in(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._take(fd, mapping)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map memory made elsewhere; the descriptor is this object's from now on.

        If that fails the descriptor is closed: nobody else has it.

        Raises:
            ValueError: there is nothing to map.
        """
        self = cls.__new__(cls)
        try:
            nbytes = os.fstat(fd).st_size
            if not nbytes:
                raise ValueError("the descriptor is of an empty file, or of no memory")
            self._take(fd, Mapping(fd, nbytes))
        except BaseException:
            os.close(fd)
            raise
        return self

    def _take(self, fd: int, mapping: Mapping) -> None:
        self.fd = fd
        self.nbytes = mapping.nbytes
        self.bytes: npt.NDArray[np.uint8] = mapping.bytes
        self._mapping: Mapping | None = mapping

    def write_at(self, offset: int, data: Any) -> None:
        """Copy bytes in without the mapping, which may end before; the memory grows as needed.

        Raises:
            OSError: there is no memory left.
        """
        left = memoryview(data).cast("B")
        while left:
            count = os.pwrite(self.fd, left, offset)
            left, offset = left[count:], offset + count

    def mapped_anew(self) -> Arena:
        """The same memory in another mapping, as long as it is now; close both."""
        return Arena.attach(os.dup(self.fd))

    def keep_from_children(self) -> None:
        """Do not map it in processes forked from this one, where a write would reach its users."""
        assert self._mapping is not None
        self._mapping.keep_from_children()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.fd < 0

    def close(self) -> None:
        """Give the memory back, once no array of it is in use; calling it again does nothing."""
        if self.closed:
            return
        os.close(self.fd)
        self.fd = -1
        # A caller may still hold a part of it: the mapping ends with that part.
        self.bytes = np.empty(0, np.uint8)
        self._mapping = None
