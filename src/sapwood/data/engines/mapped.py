"""Records straight from the page cache: the fastest way when the file is in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from time import perf_counter_ns

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.gather import gather_records

__all__ = ["Mapped"]


class Mapped:
    """Copy records out of a mapping of the file.

    A file that somebody cuts off meanwhile ends the process, as it does with LMDB itself: that is
    what the system does to those who touch a mapped page which is no more.
    """

    name = "mapped"

    def __init__(self, job: Job) -> None:
        """Nothing is read yet."""
        self._job = job

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        job = self._job
        memory = job.source.mapped()
        for records in wanted:
            start = perf_counter_ns()
            offsets, lengths = job.places(records)
            data = gather_records(memory, offsets, lengths, job.index.width)
            end = perf_counter_ns()
            job.recorder.request(len(data))
            job.recorder.stats.gather_seconds += (end - start) / 1e9
            yield data
