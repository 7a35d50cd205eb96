"""One explicit read for each record."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from time import perf_counter_ns

import numpy as np

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.engines.pool import Pool, Read

__all__ = ["Direct"]


class Direct:
    """Read each record where the index says, in the order of the file.

    With ``threads`` 0 reads are made one after the other when a batch is asked for, as in the
    paper's direct I/O; with more, the next batches are read meanwhile.
    """

    name = "direct"

    def __init__(self, job: Job, offsets: Ints | None = None, *, threads: int = 0) -> None:
        """``offsets`` replace those of the index."""
        self._job = job
        self._offsets = job.index.offsets if offsets is None else offsets
        self._threads = threads

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        return self._inline(wanted) if self._threads == 0 else self._ahead(wanted)

    def _inline(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        recorder = self._job.recorder
        for records in wanted:
            data, rows = self._prepare(records)
            start = perf_counter_ns()
            with recorder.waiting():
                nbytes, count = self._fill(data, *rows)
            self._note(Read(nbytes, count, start, perf_counter_ns()))
            yield data

    def _ahead(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        settings = self._job.settings
        queue: deque[tuple[Bytes, int]] = deque()
        held = 0
        with closing(Pool(self._threads, settings.timeout, self._note)) as pool:
            while True:
                while len(queue) < settings.ahead and (held < settings.memory or not queue):
                    records = next(wanted, None)
                    if records is None:
                        break
                    data, rows = self._prepare(records)
                    self._submit(pool, data, rows)
                    queue.append((data, pool.asked))
                    held += len(data)
                if not queue:
                    return
                data, upto = queue.popleft()
                held -= len(data)
                with self._job.recorder.waiting():
                    pool.wait(upto)
                yield data

    def _submit(self, pool: Pool, data: Bytes, rows: tuple[Ints, Ints, Ints]) -> None:
        for part in zip(*(np.array_split(one, self._threads) for one in rows), strict=True):
            if len(part[0]):
                pool.submit(partial(self._fill, data, *part))

    def _prepare(self, records: Ints) -> tuple[Bytes, tuple[Ints, Ints, Ints]]:
        """Memory for a batch, and where in it and in the file each record is, by file."""
        _, lengths = self._job.places(records)
        offsets = self._offsets[records]
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(offsets, kind="stable")
        data = np.empty(int(lengths.sum()), np.uint8)
        return data, (starts[order], offsets[order], lengths[order])

    def _fill(self, data: Bytes, starts: Ints, offsets: Ints, lengths: Ints) -> tuple[int, int]:
        source, view = self._job.source, memoryview(data)  # type: ignore[arg-type]
        for start, offset, length in zip(
            starts.tolist(), offsets.tolist(), lengths.tolist(), strict=True
        ):
            source.read_into(source.fd, view[start : start + length], offset, length)
        return int(lengths.sum()), len(starts)

    def _note(self, read: Read) -> None:
        if read.requests:
            self._job.recorder.request(read.nbytes, read.start_ns, read.end_ns, read.requests)
