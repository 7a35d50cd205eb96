"""Records by number, for torch's DataLoader and its samplers."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from sapwood.data.batch import Batch, KeyPlaces
from sapwood.data.check import optional_callable, require_int
from sapwood.data.decode import decode_batch
from sapwood.data.index import Index
from sapwood.data.sidecar import open_index
from sapwood.data.source import Source
from sapwood.errors import ConfigError, DataError, SapwoodError, UsageError

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
            ConfigError: an argument is of a wrong type.
            DataError: the database is damaged.
        """
        optional_callable("decode", decode)
        self._arguments = (path, database, decode, index)
        self._found: Index | SapwoodError = open_index(path, database, file=index)
        self._decode = decode
        self._source: Source | None = None

    @property
    def _index(self) -> Index:
        if isinstance(self._found, SapwoodError):
            raise self._found
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        """Arguments only: a copy opens the database by itself."""
        state: dict[str, Any] = {"arguments": self._arguments}
        if get_spawning_popen() is not None:
            state["fingerprint"] = self._index.fingerprint
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database in this process.

        Raises:
            DataError: it is damaged.
        """
        self._arguments = path, database, self._decode, index = state["arguments"]
        self._source = None
        spawned = "fingerprint" in state
        try:
            self._found = open_index(path, database, file=index)
            if spawned and self._found.fingerprint != state["fingerprint"]:
                # The numbers that are asked for are those of the records it had before.
                raise DataError(f"{self._found.file}: the database was changed; make a new dataset")
        except SapwoodError as error:
            if not spawned:
                raise
            self._found = error  # a worker that ends while it starts says nothing

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._index)

    def __getitem__(self, record: int) -> Any:
        """One record: its bytes, or what ``decode`` makes of a batch of one."""
        try:
            record = require_int("record", record)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        batch = self._batch(self._numbers([record]))
        return batch.data.tobytes() if self._decode is None else self._decoded(batch)

    def __getitems__(self, records: Sequence[int]) -> Any:
        """Several records, as one batch."""
        return self.take(records)

    def take(self, records: Sequence[int] | NDArray[np.int64]) -> Any:
        """Several records, as one batch.

        With ``batch.index`` of a reader these are the same records of another database of the
        file, such as the labels of images. Numbers below 0 count from the end.

        Raises:
            UsageError: these are no numbers of records.
            IndexError: there is no such record.
        """
        batch = self._batch(self._numbers(records))
        return batch if self._decode is None else self._decoded(batch)

    def _decoded(self, batch: Batch) -> Any:
        assert self._decode is not None
        return decode_batch(self._decode, batch, "")

    def _numbers(self, records: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        try:
            found = np.asarray(records)
        except (TypeError, ValueError):
            found = np.empty((), object)
        # Fractions would be cut off, and a mask taken for the numbers 0 and 1.
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise UsageError(
                f"records={reprlib.repr(records)}: expected a list or array of whole numbers"
            )
        count, found = len(self), found.astype(np.int64)
        wrong = np.flatnonzero((found < -count) | (found >= count))
        if len(wrong):
            raise IndexError(f"record {int(found[wrong[0]])} of {count}")
        return np.where(found < 0, found + count, found)

    def _batch(self, records: NDArray[np.int64]) -> Batch:
        if self._source is None:
            self._source = Source(self._index)
        index, source = self._index, self._source
        lengths = index.lengths_of(records)
        data = source.gather(index.offsets[records], lengths)
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
