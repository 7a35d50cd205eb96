"""Read the pages where records should be, before it is known where they are.

The paper's readers hand a cursor on from one to the next, which takes a while, and meanwhile read
the pages they expect to need. A cursor of LMDB is made of addresses, so it needed the database at
the same address in every process. Here a position is the number of a record, which means the same
everywhere, and there is nothing to hand on; what is left is to guess, and to count how well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from sapwood.data.engines.base import MIB, Bytes, Ints, Job
from sapwood.data.layout import HEADER
from sapwood.errors import ConfigError

__all__ = ["Guess", "Speculative"]

_FIRST_PAGE = 2


@dataclass(kw_only=True)
class Guess:
    """Which pages a batch needs, from how many the batches before it needed."""

    pages_of_one: int
    """Pages of the first record; all are taken to be like it at first."""
    start: int = -1
    """The first page of the batch before."""
    record: int = -1
    """Its first record."""
    count: int = 0
    least: int = 0
    most: int = 0
    """How few and how many pages a batch has needed so far."""

    def pages(self, record: int, count: int) -> tuple[int, int]:
        """The first page a batch may need, and the one after the last."""
        if self.start < 0 or record <= self.record:
            first = _FIRST_PAGE + record * self.pages_of_one
            return first, first + count * self.pages_of_one
        steps = (record - self.record) / max(self.count, 1)
        low = self.start + int(steps * self.least)
        high = self.start + int(np.ceil(steps * self.most)) + self.most
        return low, high

    def learn(self, record: int, count: int, first: int, last: int) -> None:
        """Note which pages a batch really needed."""
        needed = last - first + 1
        self.least = min(self.least, needed) if self.least else needed
        self.most = max(self.most, needed)
        self.start, self.record, self.count = first, record, count


class Speculative:
    """Read guessed pages in one piece, and what was guessed wrong page by page."""

    name = "speculative"

    def __init__(self, job: Job, *, steps: bool) -> None:
        """``steps``: records are wanted in the order of keys.

        Raises:
            ConfigError: they are not, so that there is nothing to guess by.
        """
        if not steps:
            raise ConfigError(
                "policy='lmm-dm' guesses the next pages from the last ones, which needs "
                "shuffle='none'; use another policy to shuffle"
            )
        self._job = job
        self._scratch = memoryview(bytearray(MIB))

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        job = self._job
        size = job.index.page_size
        guess = Guess(pages_of_one=(HEADER - 1 + int(job.index.lengths[0])) // size + 1)
        for records in wanted:
            offsets, lengths = job.places(records)
            if len(records):
                low, high = guess.pages(int(records[0]), len(records))
                with job.recorder.waiting():
                    self._read_pages(max(low, 0), min(high, job.source.size // size), size)
                needed = _pages(offsets, lengths, size)
                self._count(needed, low, high)
                guess.learn(int(records[0]), len(records), int(needed[0]), int(needed[-1]))
            yield job.source.gather(offsets, lengths)

    def _read_pages(self, low: int, high: int, size: int) -> None:
        source, start = self._job.source, perf_counter_ns()
        if low >= high:
            return
        source.advise(low * size, high * size)
        for at in range(low * size, high * size, MIB):
            part = min(MIB, high * size - at)
            source.read_into(source.fd, self._scratch[:part], at, part)
        self._job.recorder.request((high - low) * size, start, perf_counter_ns())

    def _count(self, needed: Ints, low: int, high: int) -> None:
        stats = self._job.recorder.stats
        hits = int(((needed >= low) & (needed < high)).sum())
        stats.missed_pages += len(needed) - hits
        stats.redundant_pages += max(high - low, 0) - hits


def _pages(offsets: Ints, lengths: Ints, size: int) -> Ints:
    """The pages on which records are, each once and in order."""
    first = offsets // size
    counts = (offsets + np.maximum(lengths, 1) - 1) // size - first + 1
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.unique(np.repeat(first, counts) + inside)
