"""Memory that is kept from one pass to the next."""

from __future__ import annotations

import mmap
from contextlib import suppress

from sapwood.data.source import FileMap

__all__ = ["Spare"]

_WIPE_ON_FORK = 18
"""Python has no name for it. A fork would have the pages copied that reads still write to; so a
child gets empty ones instead."""


class Spare:
    """What a pass that has ended leaves to the next one of the same reader.

    Memory costs the most when it is touched for the first time: more than to read into it from a
    fast disk, on a virtual machine several times as much.
    """

    def __init__(self) -> None:
        """There is none yet."""
        self.maps = FileMap()
        self._kept: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """Memory of this size, in as large pages as the system has."""
        while self._kept:
            found = self._kept.pop()
            if len(found) == nbytes:
                return found
        made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
            with suppress(OSError):
                made.madvise(advice)
        return made

    def give(self, memory: mmap.mmap) -> None:
        """Keep memory that nobody reads into any more."""
        self._kept = [memory]

    def drop(self) -> None:
        """Give all of it back to the system."""
        self._kept = []
        self.maps.drop()
