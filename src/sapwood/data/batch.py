"""What a reader gives: the records of one batch that are this rank's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sapwood.data.index import Index
from sapwood.data.pagefile import open_pages
from sapwood.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "KeyPlaces"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyPlaces:
    """Where the keys of some records are; they are read when somebody asks for them."""

    index: Index
    records: Ints

    def read(self) -> list[bytes]:
        """Read the keys.

        Raises:
            DataError: the database cannot be read, or was changed meanwhile.
        """
        index, records = self.index, self.records
        offsets, lengths = index.key_offsets[records], index.key_lengths[records]
        with open_pages(index.file) as pages:
            if pages.fingerprint != index.fingerprint:
                raise DataError("the database was changed while it was read")
            found = [
                os.pread(pages.fd, nbytes, offset)
                for offset, nbytes in zip(offsets.tolist(), lengths.tolist(), strict=True)
            ]
            pages.check_unchanged()
        return found

    def __reduce__(self) -> tuple[type[KeyPlaces], tuple[Index, Ints]]:
        """A pickle holds the places of these records only."""
        return KeyPlaces, (self.index.take(self.records), np.arange(len(self.records)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Records, packed one after the other in memory that is the batch's own.

    It can be pickled, kept as long as one likes, and written to.
    """

    epoch: int
    number: int
    """Which batch of the epoch it is."""
    index: Ints
    """The number of each record, in the order of keys."""
    lengths: Ints
    data: NDArray[np.uint8]
    """All records, one after the other."""
    places: KeyPlaces

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.index)

    def __getitem__(self, row: int) -> memoryview:
        """One record."""
        return self.records[row]

    def __iter__(self) -> Iterator[memoryview]:
        """The records."""
        return iter(self.records)

    def part(self, low: int, high: int) -> Batch:
        """Some records that follow each other, as a batch that shares this one's memory."""
        ends = np.cumsum(self.lengths)
        first, last = (int(ends[one - 1]) if one else 0 for one in (low, high))
        return replace(
            self,
            index=self.index[low:high],
            lengths=self.lengths[low:high],
            data=self.data[first:last],
            places=replace(self.places, records=self.places.records[low:high]),
        )

    @cached_property
    def starts(self) -> Ints:
        """Where each record begins in ``data``."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def records(self) -> list[memoryview]:
        """A view of each record; nothing is copied."""
        view = memoryview(self.data)  # type: ignore[arg-type]
        ends = np.cumsum(self.lengths).tolist()
        return [view[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=False)]

    @cached_property
    def keys(self) -> list[bytes]:
        """The key of each record; they are elsewhere in the file, and read when asked for.

        Raises:
            DataError: the database cannot be read, or was changed meanwhile.
        """
        return self.places.read()

    @property
    def tensor(self) -> torch.Tensor:
        """One row of bytes for each record, as a tensor that shares the batch's memory.

        Raises:
            UsageError: records have different lengths.
        """
        import torch

        if len(self.lengths) and (self.lengths != self.lengths[0]).any():
            raise UsageError(
                f"batch.tensor needs records of one length, and these have from "
                f"{int(self.lengths.min())} to {int(self.lengths.max())} bytes; use batch.records, "
                "or batch.data with batch.starts and batch.lengths"
            )
        width = int(self.lengths[0]) if len(self.lengths) else 0
        return torch.from_numpy(self.data.reshape(len(self.lengths), width))
