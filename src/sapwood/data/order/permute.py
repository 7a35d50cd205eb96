"""Permutations that any machine and any release computes alike, from a key of 64 bits.

numpy's generators may give other numbers in another release, and an order that is kept in a
checkpoint as a seed must not change with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Permutation", "key_of", "mix"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TABLE = 2**17
"""Up to here a table is sorted; beyond it, numbers are computed one by one and need no memory."""
_ROUNDS = 6


def mix(words: Words) -> Words:
    """Scatter 64 bits (splitmix64); no two words give the same."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """One key from several numbers; another order of them is another key."""
    key = 0
    for number in numbers:
        word = _mix_one((key + _STEP + number * _STEP) & _MASK)
        key = _mix_one(word ^ (number & _MASK))
    return key


def _mix_one(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _MASK
    word = (word ^ (word >> 27)) * _SECOND & _MASK
    return word ^ (word >> 31)


class Permutation:
    """An order of the numbers below ``count``."""

    def __init__(self, count: int, key: int) -> None:
        """Orders of other keys have nothing to do with this one."""
        self._count = count
        self._table: NDArray[np.int32] | None = None
        if count <= _TABLE:
            places = np.arange(count, dtype=np.uint64)
            words = mix(places * np.uint64(_STEP) + np.uint64(key))
            # Words that carry their place are sorted several times as fast as places by words.
            low = np.uint64(_TABLE - 1)
            # Readers keep several of these, and no number in them needs more.
            self._table = (np.sort((words & ~low) | places) & low).astype(np.int32)
            return
        self._half = ((max(count, 2) - 1).bit_length() + 1) // 2
        self._keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]

    @property
    def nbytes(self) -> int:
        """What it takes of memory."""
        return 0 if self._table is None else self._table.nbytes

    def __call__(self, places: Ints) -> Ints:
        """What stands at these places, which lie from 0 to ``count - 1``."""
        if self._table is not None:
            return self._table[places].astype(np.int64)
        found = self._scatter(places.astype(np.uint64))
        # The network permutes a power of four; what falls outside goes on until it falls inside.
        outside = np.flatnonzero(found >= self._count)
        while len(outside):
            found[outside] = self._scatter(found[outside])
            outside = outside[found[outside] >= self._count]
        return found.astype(np.int64)

    def _scatter(self, words: Words) -> Words:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = words >> half, words & mask
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & mask)
        return left << half | right
