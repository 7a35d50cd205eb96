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
    records: Ints | None
    """Numbers of records in the order of the file; None if it is that of keys, as it mostly is."""
    starts: Ints
    """Where each chunk begins among them, and one more: their number."""
    ids: Ints
    """Which part of the file each chunk is, in order."""
    low: Ints
    """The first byte of each chunk's records."""
    high: Ints
    """The end of each chunk's records, which may lie beyond the chunk's own."""

    @classmethod
    def of(
        cls,
        offsets: Ints,
        lengths: NDArray[np.integer],
        nbytes: int,
        *,
        ends: NDArray[np.bool_] | None = None,
    ) -> Chunks:
        """Cut a file of which these are the records.

        ``ends`` says after which records chunks end in any case, if these are in the file's order.

        Raises:
            ConfigError: chunks cannot have that size.
        """
        if nbytes < 4096 or nbytes % 4096:
            raise ConfigError(f"chunk={nbytes}: expected a multiple of 4096 bytes")
        count = len(offsets)
        records = None
        if bool((offsets[1:] < offsets[:-1]).any()):
            records = np.argsort(offsets, kind="stable")
            offsets, lengths = offsets[records], lengths[records]
        pieces = offsets // nbytes
        change = pieces[1:] != pieces[:-1] if ends is None else (pieces[1:] != pieces[:-1]) | ends
        firsts = np.flatnonzero(np.concatenate(([True] * (count > 0), change)))
        behind = offsets + lengths
        return cls(
            nbytes=nbytes,
            records=records,
            starts=np.append(firsts, count),
            ids=pieces[firsts],
            low=offsets[firsts],
            high=np.maximum.reduceat(behind, firsts) if count else behind,
        )

    def __len__(self) -> int:
        """How many chunks have records."""
        return len(self.ids)

    @property
    def count(self) -> int:
        """How many records there are."""
        return int(self.starts[-1])

    def at(self, places: Ints) -> Ints:
        """The records at these places in the file."""
        return places if self.records is None else self.records[places]

    @property
    def each(self) -> float:
        """Bytes of the file for each record."""
        return max(float((self.high - self.low).sum()) / max(self.count, 1), 1.0)

    @property
    def counts(self) -> Ints:
        """How many records each chunk has."""
        return np.diff(self.starts)

    def holding(self, offsets: Ints) -> Ints:
        """The chunks of the records at these offsets."""
        if self._numbers is None:
            return np.searchsorted(self.low, offsets, side="right") - 1
        found: Ints = self._numbers[offsets // self.nbytes]
        return found

    @cached_property
    def _numbers(self) -> Ints | None:
        """The chunk that each part of the file is, if it is one; faster than searching."""
        if len(self) and (self.ids[1:] == self.ids[:-1]).any():
            return None
        table = np.zeros(int(self.ids[-1]) + 1 if len(self) else 0, np.int64)
        table[self.ids] = np.arange(len(self))
        return table
