"""The baseline: records through py-lmdb, as everybody reads them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from time import perf_counter_ns
from typing import Any

import numpy as np

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.index import list_databases
from sapwood.data.layout import DUPSORT
from sapwood.errors import ConfigError, DataError

__all__ = ["Cursor"]


class Cursor:
    """Each rank has a cursor of its own.

    In the order of keys it steps from its last record to the next one, over those of all other
    ranks: the sequential seek of the paper. In any other order each record is looked up by key.
    """

    name = "lmdb"

    def __init__(self, job: Job, *, steps: bool) -> None:
        """``steps``: records are wanted in the order of keys.

        Raises:
            ConfigError: py-lmdb is missing, or cannot find these records by key.
        """
        try:
            import lmdb
        except ImportError as error:
            raise ConfigError(
                "policy='lmdb' needs py-lmdb: pip install 'sapwood[data]', or use another policy"
            ) from error
        if not steps and job.index.flags & DUPSORT:
            raise ConfigError(
                "policy='lmdb' cannot shuffle a database whose keys have several values: "
                "use shuffle='none' or another policy"
            )
        self._lmdb, self._job, self._steps = lmdb, job, steps

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        name = self._job.index.database
        with ExitStack() as stack:
            try:
                env = stack.enter_context(self._open())
                db = env.open_db(name, create=False) if name is not None else None
                txn = stack.enter_context(env.begin(db=db, buffers=True))
                cursor = stack.enter_context(closing(txn.cursor()))
            except self._lmdb.Error as error:
                raise DataError(f"{self._job.source.path}: py-lmdb: {error}") from error
            walk = _Walk(self._job, cursor) if self._steps else _Lookup(self._job, txn)
            for records in wanted:
                # LMDB's own mapping cannot be guarded. A file that was cut off since the last batch
                # is noticed here; while a batch is read, it ends the process.
                self._job.source.check()
                yield self._batch(walk, records)

    def _open(self) -> Any:
        path = str(self._job.source.path)
        return self._lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=1)

    def _batch(self, walk: _Walk | _Lookup, records: Ints) -> Bytes:
        _, lengths = self._job.places(records)
        data = np.empty(int(lengths.sum()), np.uint8)
        view, at = memoryview(data), 0  # type: ignore[arg-type]
        start = perf_counter_ns()
        with self._job.recorder.waiting():
            for record, length in zip(records.tolist(), lengths.tolist(), strict=True):
                value = walk.value(record)
                if len(value) != length:
                    raise DataError(
                        f"record {record}: expected {length} bytes, py-lmdb gives {len(value)}"
                    )
                view[at : at + length] = value
                at += length
        self._job.recorder.request(len(data), start, perf_counter_ns())
        return data


class _Walk:
    """Step to a record; the database is a circle."""

    def __init__(self, job: Job, cursor: Any) -> None:
        self._cursor, self._at = cursor, -1
        main = job.index.database is None
        self._names = set(list_databases(job.source.path)) if main else set()

    def value(self, record: int) -> Any:
        if record < self._at:
            self._at = -1
        while self._at < record:
            moved = self._cursor.first() if self._at < 0 else self._cursor.next()
            while moved and self._names and bytes(self._cursor.key()) in self._names:
                moved = self._cursor.next()
            if not moved:
                raise DataError(f"record {record}: py-lmdb finds only {self._at + 1} records")
            self._at += 1
        return self._cursor.value()


class _Lookup:
    """Find a record by its key."""

    def __init__(self, job: Job, txn: Any) -> None:
        self._job, self._txn = job, txn

    def value(self, record: int) -> Any:
        index, source = self._job.index, self._job.source
        key = bytearray(int(index.key_lengths[record]))
        source.read_into(source.fd, memoryview(key), int(index.key_offsets[record]), len(key))
        value = self._txn.get(bytes(key))
        if value is None:
            raise DataError(f"record {record}: py-lmdb does not find the key {bytes(key)!r}")
        return value
