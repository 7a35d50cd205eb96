"""Memory for bytes that will arrive: aligned, and mapped before they do."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["fresh_memory"]

_ALIGNMENT = 64
_LARGE = 2**20


def fresh_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory aligned as torch wants it: it may become an optimizer's state as it is.

    Large ones are mapped at once. Page by page takes longer; huge pages, which numpy asks for, are
    fastest where there are some, and take five times as long where memory must be moved for them.
    """
    if nbytes < _LARGE:
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + nbytes]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
