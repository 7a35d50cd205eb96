"""Which runs of an address space are free: best fit over size classes, with coalescing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from sapwood.buffers.mapping import round_up

__all__ = ["GRANULE", "FreeSpace"]

GRANULE = 64
"""Runs begin and end at multiples of this."""
_SPLITS = 3
"""Each power of two has 2**3 classes."""
_TRIES = 8
"""Runs of fitting size that are looked at before one is taken that fits at any alignment."""


class FreeSpace:
    """Free runs of addresses, never two next to each other. Not safe between threads.

    Classes are in the order of sizes and sorted inside, so that the first that fits is the best
    that fits: a bitmap finds the class, a bisection the run. Exact sizes that come back, as those
    of a model saved again and again, are found again without splitting anything.
    """

    def __init__(self) -> None:
        """Nothing is free until it is added."""
        self.nbytes = 0
        """Free in all."""
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._classes: dict[int, list[tuple[int, int]]] = {}
        self._filled = 0
        """A bit for each class that has runs."""

    @property
    def largest(self) -> int:
        """The longest run."""
        if not self._filled:
            return 0
        return self._classes[self._filled.bit_length() - 1][-1][0]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """All runs, as (start, end), in order."""
        return sorted(self._end_of.items())

    def add(self, start: int, nbytes: int) -> None:
        """A run is free, for the first time or again; it is joined with its neighbours."""
        end = start + nbytes
        self.nbytes += nbytes
        before = self._start_of.get(start)
        if before is not None:
            self._drop(before, start)
            start = before
        after = self._end_of.get(end)
        if after is not None:
            self._drop(end, after)
            end = after
        self._put(start, end)

    def take(self, nbytes: int, alignment: int = GRANULE) -> int | None:
        """The start of a run that was free and no longer is; None if there is none."""
        run = self._find(nbytes, alignment)
        if run is None:
            return None
        self._drop(*run)
        begin = round_up(run[0], alignment)
        if begin > run[0]:
            self._put(run[0], begin)
        if begin + nbytes < run[1]:
            self._put(begin + nbytes, run[1])
        self.nbytes -= nbytes
        return begin

    def ending_at(self, end: int) -> int:
        """The length of the free run that ends there."""
        return end - self._start_of.get(end, end)

    def _find(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        for size, start in islice(self._from(nbytes), _TRIES):
            if round_up(start, alignment) + nbytes <= start + size:
                return start, start + size
        # So long that it fits wherever it begins.
        for size, start in self._from(nbytes + alignment - GRANULE):
            return start, start + size
        return None

    def _from(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Runs of that size or more as (size, start), the shortest first."""
        first = _class_of(nbytes)
        left = self._filled >> first << first
        while left:
            runs = self._classes[(left & -left).bit_length() - 1]
            for number in range(bisect_left(runs, (nbytes, 0)), len(runs)):
                yield runs[number]
            left &= left - 1

    def _put(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        number = _class_of(end - start)
        insort(self._classes.setdefault(number, []), (end - start, start))
        self._filled |= 1 << number

    def _drop(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        number = _class_of(end - start)
        runs = self._classes[number]
        del runs[bisect_left(runs, (end - start, start))]
        if not runs:
            self._filled &= ~(1 << number)


def _class_of(nbytes: int) -> int:
    power = nbytes.bit_length() - 1
    step = nbytes >> (power - _SPLITS) & (1 << _SPLITS) - 1
    return (power << _SPLITS) + step
