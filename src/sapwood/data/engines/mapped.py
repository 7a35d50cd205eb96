"""Records straight from the page cache: the fastest way when the file is in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from time import perf_counter_ns

from sapwood.data.engines.base import Bytes, Ints, Job

__all__ = ["Mapped"]


class Mapped:
    """Have records copied out of a mapping of the file, several at once."""

    name = "mapped"

    def __init__(self, job: Job) -> None:
        """Nothing is read yet."""
        self._job = job

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        job = self._job
        for records in wanted:
            start = perf_counter_ns()
            offsets, lengths = job.places(records)
            data = job.source.gather(offsets, lengths)
            end = perf_counter_ns()
            job.recorder.request(len(data))
            job.recorder.stats.gather_seconds += (end - start) / 1e9
            yield data
