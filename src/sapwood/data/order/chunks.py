"""Which records lie in which part of the file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sapwood.errors import ConfigError

__all__ = ["Chunks"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The file cut into pieces of the same size; a record is of the chunk in which it starts.

    Chunks in which no record starts do not count. Records are numbered in the order of keys, which
    need not be that of the file.
    """

    nbytes: int
    records: Ints
    """Numbers of records in the order of the file."""
    starts: Ints
    """Where each chunk begins in ``records``, and one more: their number."""
    ids: Ints
    """Which part of the file each chunk is, in order."""
    low: Ints
    """The first byte of each chunk's records."""
    high: Ints
    """The end of each chunk's records, which may lie beyond the chunk's own."""

    @classmethod
    def of(cls, offsets: Ints, lengths: NDArray[np.integer], nbytes: int) -> Chunks:
        """Cut a file of which these are the records.

        Raises:
            ConfigError: chunks cannot have that size.
        """
        if nbytes < 4096 or nbytes % 4096:
            raise ConfigError(f"chunk={nbytes}: expected a multiple of 4096 bytes")
        count = len(offsets)
        sorted_already = count < 2 or bool((offsets[1:] >= offsets[:-1]).all())
        records = np.arange(count) if sorted_already else np.argsort(offsets, kind="stable")
        placed = offsets[records]
        pieces = placed // nbytes
        firsts = np.flatnonzero(np.diff(pieces, prepend=-1))
        ends = placed + lengths[records].astype(np.int64)
        return cls(
            nbytes=nbytes,
            records=records,
            starts=np.append(firsts, count),
            ids=pieces[firsts],
            low=placed[firsts],
            high=np.maximum.reduceat(ends, firsts) if count else ends,
        )

    def __len__(self) -> int:
        """How many chunks have records."""
        return len(self.ids)

    @property
    def counts(self) -> Ints:
        """How many records each chunk has."""
        return np.diff(self.starts)

    def holding(self, offsets: Ints) -> Ints:
        """The chunks of the records at these offsets."""
        found: Ints = self._numbers[offsets // self.nbytes]
        return found

    @cached_property
    def _numbers(self) -> Ints:
        """The chunk that each part of the file is; looking it up is faster than searching."""
        table = np.zeros(int(self.ids[-1]) + 1 if len(self) else 0, np.int64)
        table[self.ids] = np.arange(len(self))
        return table
