"""Which chunks batches need, and in how many parts they must be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.engines.ring import Home

__all__ = ["Planner", "Turn"]


@dataclass(kw_only=True)
class Turn:
    """Records whose chunks are in memory at the same time: a batch, or a part of a large one."""

    batch: int
    chunks: Ints
    """The chunk of each."""
    needed: Ints
    """The same, each once."""
    ends: Ints
    """Those of them of which no record is left for later."""
    offsets: Ints
    lengths: Ints
    data: Bytes | None = None
    """The memory of the whole batch, if this is a part of it."""
    starts: Ints | None = None
    """Where in it the records go."""
    last: bool = True
    """No other turn of the batch follows."""
    long: bool = False
    """Their chunks are too long for a buffer; they are read one by one."""
    upto: int = 0
    """The reads below this number must be done before."""


class Planner:
    """Plans batches, several at once: that costs hardly more than one."""

    def __init__(self, job: Job, home: Home) -> None:
        """Nothing is planned yet."""
        self._job, self._home = job, home
        self._planned = 0
        self._seen = np.zeros(len(job.chunks), np.int64)
        """Where each chunk stood last among the records of a batch."""
        self._left = job.chunks.counts * job.uses
        """How many records of each chunk are still to come in an epoch, if all are this rank's."""

    def plan(self, group: Sequence[Ints]) -> list[list[Turn]]:
        """The turns of the next batches."""
        job, home, found, low = self._job, self._home, [], 0
        offsets, lengths = job.places(np.concatenate(group))
        chunks = job.chunks.holding(offsets)
        for records in group:
            rows = slice(low, low + len(records))
            low += len(records)
            needed = self._once(chunks[rows])
            batch = Turn(
                batch=self._planned,
                chunks=chunks[rows],
                needed=needed,
                ends=self._ended(chunks[rows], needed),
                offsets=offsets[rows],
                lengths=lengths[rows],
            )
            self._planned += 1
            found.append(_parts(batch, home.most, home.fits(batch.needed)))
        return found

    def _once(self, chunks: Ints) -> Ints:
        """Each chunk once, by what is faster than sorting."""
        places = np.arange(len(chunks))
        self._seen[chunks] = places
        found: Ints = chunks[self._seen[chunks] == places]
        return found

    def _ended(self, chunks: Ints, needed: Ints) -> Ints:
        np.subtract.at(self._left, chunks, 1)
        ended: Ints = needed[self._left[needed] <= 0]
        if len(ended):
            self._left[ended] += self._job.chunks.counts[ended] * self._job.uses
        return ended


def _parts(batch: Turn, most: int, fits: NDArray[np.bool_] | None) -> list[Turn]:
    """A batch in as many parts as there must be for each to find room."""
    needed = batch.needed
    if len(needed) <= most and (fits is None or fits.all()):
        return [batch]
    long = needed[:0] if fits is None else needed[~fits]
    short = needed if fits is None else needed[fits]
    data = np.empty(int(batch.lengths.sum()), np.uint8)
    starts = np.cumsum(batch.lengths) - batch.lengths
    count = -(-len(short) // most)
    groups = np.array_split(short, count) if count else []
    turns = [_part(batch, one, data, starts) for one in groups]
    if len(long):
        turns.append(replace(_part(batch, long, data, starts), long=True))
    turns[-1] = replace(turns[-1], last=True)
    return turns


def _part(batch: Turn, needed: Ints, data: Bytes, starts: Ints) -> Turn:
    """The part of a batch that is in these chunks."""
    rows = np.flatnonzero(np.isin(batch.chunks, needed))
    return Turn(
        batch=batch.batch,
        chunks=batch.chunks[rows],
        needed=needed,
        ends=batch.ends[np.isin(batch.ends, needed)],
        offsets=batch.offsets[rows],
        lengths=batch.lengths[rows],
        data=data,
        starts=starts[rows],
        last=False,
    )
