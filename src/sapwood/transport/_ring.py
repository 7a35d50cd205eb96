"""Slots of shared memory without a name."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

__all__ = ["SLOTS", "SLOT_BYTES", "Ring", "RingError"]

# Small enough that a slot is still in the cache when the other side copies it out.
SLOT_BYTES = 512 * 1024
SLOTS = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RingError(ValueError):
    """What another process gave is not a ring."""


class Ring:
    """The slots one side writes and the other reads."""

    def __init__(self, fd: int) -> None:
        """Map ``fd``, which becomes the ring's own."""
        self.fd = fd
        self._memory = mmap.mmap(fd, SLOTS * SLOT_BYTES)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def make(cls) -> Ring:
        """A new one. Sealed, so that its reader cannot be made to read past its end."""
        fd = os.memfd_create("sapwood-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SLOTS * SLOT_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, fd: int) -> Ring:
        """That of another process."""
        try:
            os.set_inheritable(fd, False)
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise RingError("it sent a descriptor that is not shared memory") from error
            if seals & _SEALS != _SEALS or os.fstat(fd).st_size != SLOTS * SLOT_BYTES:
                raise RingError("its shared memory has another size, or may still change it")
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def slot(self, number: int, length: int) -> npt.NDArray[np.uint8]:
        """The first ``length`` bytes of a slot."""
        assert self._bytes is not None
        return self._bytes[number * SLOT_BYTES : number * SLOT_BYTES + length]

    def close(self) -> None:
        """Give it back; the memory goes when the other side has done so too."""
        if self._bytes is None:
            return
        self._bytes = None
        with suppress(BufferError):  # a view is still held; it goes with that
            self._memory.close()
        os.close(self.fd)
