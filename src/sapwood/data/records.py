"""Records by number, for torch's DataLoader and its samplers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from sapwood.data.batch import Batch, KeyPlaces
from sapwood.data.gather import gather_records
from sapwood.data.sidecar import open_index
from sapwood.data.source import Source

__all__ = ["LmdbRecords"]


class LmdbRecords(Dataset[Any]):
    """The records of a database, as a map-style dataset: each number is one in the order of keys.

    A DataLoader asks for all records of a batch at once, and gets them as one ``Batch``, or as what
    ``decode`` makes of it; so it needs a ``collate_fn`` that takes that.

    Example:
        loader = DataLoader(
            LmdbRecords("train.mdb", decode=lambda batch: batch.tensor),
            batch_size=256, shuffle=True, collate_fn=lambda batch: batch,
        )
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        database: str | bytes | None = None,
        decode: Callable[[Batch], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        """Open the index, or make it.

        Raises:
            DataError: the database is damaged.
        """
        self._arguments = (path, database, decode, index)
        self._open()

    def _open(self) -> None:
        path, database, self._decode, index = self._arguments
        self._index = open_index(path, database, file=index)
        self._source: Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Arguments only: a copy opens the database by itself."""
        return {"arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database in this process."""
        self._arguments = state["arguments"]
        self._open()

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._index)

    def __getitem__(self, record: int) -> Any:
        """One record: its bytes, or what ``decode`` makes of a batch of one."""
        if not -len(self) <= record < len(self):
            raise IndexError(f"record {record} of {len(self)}")
        batch = self._batch(np.array([record % len(self)], np.int64))
        return batch.data.tobytes() if self._decode is None else self._decode(batch)

    def __getitems__(self, records: Sequence[int]) -> Any:
        """Several records, as one batch."""
        return self.take(records)

    def take(self, records: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Several records, as one batch.

        With ``batch.index`` of a reader these are the same records of another database of the
        file, such as the labels of images.
        """
        batch = self._batch(np.asarray(records, np.int64))
        return batch if self._decode is None else self._decode(batch)

    def _batch(self, records: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
        if self._source is None:
            self._source = Source(self._index)
        index, source = self._index, self._source
        lengths = index.lengths_of(records)
        data = gather_records(source.mapped(), index.offsets[records], lengths, index.width)
        source.check()
        return Batch(
            epoch=0,
            number=0,
            index=records,
            lengths=lengths,
            data=data,
            places=KeyPlaces(index, records),
        )

    def close(self) -> None:
        """Close the file; it is opened again when a record is asked for."""
        if self._source is not None:
            self._source.close()
            self._source = None
