"""Where chunks are while their records are needed: a ring of buffers, or the page cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.gather import copy_records, gather_records
from sapwood.data.source import ALIGN

__all__ = ["Cache", "Home", "Ring"]

_EMPTY = -1
_NEEDED = 2**62


class Home(Protocol):
    """Memory for chunks. Only the thread that asks for batches calls it, but for ``fill``."""

    most: int
    """How many chunks can be in it at the same time."""

    def fits(self, chunks: Ints) -> NDArray[np.bool_] | None:
        """Which chunks are not too long for it; None if all are not."""
        ...

    def reserve(self, chunks: Ints, ends: Ints, turn: int, done: int) -> list[int] | None:
        """Make room for the chunks of a turn; turns below ``done`` need theirs no more.

        ``ends`` are those that are not needed after it.
        Gives those that must be read now, or None if there is no room before another turn is done.
        """
        ...

    def fill(self, chunk: int) -> tuple[int, int]:
        """Read a chunk to its room; gives the bytes read, and in how many requests."""
        ...

    def gather(self, chunks: Ints, offsets: Ints, lengths: Ints) -> Bytes:
        """The records at these offsets of the file, one after the other; their chunks are there."""
        ...

    def copy(self, out: Bytes, starts: Ints, chunks: Ints, offsets: Ints, lengths: Ints) -> None:
        """Copy these records to these places of ``out``."""
        ...

    def close(self) -> None:
        """Give memory back; only if no read is under way any more."""
        ...


class Ring:
    """A fixed number of aligned buffers; the chunk that was last needed the longest ago goes."""

    def __init__(self, job: Job) -> None:
        """Take the memory; it is touched when it is first read into."""
        self._source, self._chunks, self._length = job.source, job.chunks, job.index.width
        self._fd = job.source.direct()
        self._low = job.chunks.low // ALIGN * ALIGN
        self._high = -(-job.chunks.high // ALIGN) * ALIGN
        extent = self._high - self._low
        # One long record must not make every buffer long: those are read by themselves.
        limit = 2 * job.chunks.nbytes
        self._width = int(extent[extent <= limit].max(initial=ALIGN))
        self._long = bool((extent > limit).any())
        self.most = max(job.settings.memory // self._width, 1)
        self._spare = job.spare
        self._map = job.spare.take(self.most * self._width)
        self._memory: Bytes = np.frombuffer(self._map, np.uint8)
        self._room = np.full(len(job.chunks), _EMPTY)
        """Which buffer each chunk is in."""
        self._holds = np.full(self.most, _EMPTY)
        self._until = np.full(self.most, -1)
        """The last turn that needs each buffer."""
        self._worth = np.zeros(self.most, np.int64)
        """What was needed lately is worth the most, and what has ended nothing, not even as much as
        a buffer that was never used: memory costs the most when it is first touched."""

    def fits(self, chunks: Ints) -> NDArray[np.bool_] | None:
        """Which chunks are not too long for a buffer."""
        if not self._long:
            return None
        found: NDArray[np.bool_] = self._high[chunks] - self._low[chunks] <= self._width
        return found

    def reserve(self, chunks: Ints, ends: Ints, turn: int, done: int) -> list[int] | None:
        """Keep what is there, and replace what nobody planned to use."""
        room = self._room[chunks]
        there = room != _EMPTY
        missing: list[int] = []
        if not there.all():
            new, kept = chunks[~there], room[there]
            chosen = self._free(len(new), kept, done)
            if chosen is None:
                return None
            old = self._holds[chosen]
            self._room[old[old != _EMPTY]] = _EMPTY
            self._holds[chosen] = new
            self._room[new] = chosen
            missing, room = [int(one) for one in new], self._room[chunks]
        self._until[room] = turn
        self._worth[room] = turn + 1
        self._worth[self._room[ends]] = -1
        return missing

    def _free(self, count: int, kept: Ints, done: int) -> Ints | None:
        """The least worthy buffers that no turn needs, if there are so many."""
        worth = np.where(self._until < done, self._worth, _NEEDED)
        worth[kept] = _NEEDED
        chosen: Ints = np.argpartition(worth, min(count, self.most - 1))[:count]
        if len(chosen) < count or worth[chosen].max() == _NEEDED:
            return None
        return chosen

    def fill(self, chunk: int) -> tuple[int, int]:
        """Read a chunk with one request."""
        low, high = int(self._low[chunk]), int(self._high[chunk])
        start = int(self._room[chunk]) * self._width
        buffer = memoryview(self._map)[start : start + high - low]
        self._source.read_into(self._fd, buffer, low, int(self._chunks.high[chunk]) - low)
        return high - low, 1

    def gather(self, chunks: Ints, offsets: Ints, lengths: Ints) -> Bytes:
        """From the ring."""
        return gather_records(self._memory, self._places(chunks, offsets), lengths, self._length)

    def copy(self, out: Bytes, starts: Ints, chunks: Ints, offsets: Ints, lengths: Ints) -> None:
        """From the ring."""
        copy_records(out, starts, self._memory, self._places(chunks, offsets), lengths)

    def _places(self, chunks: Ints, offsets: Ints) -> Ints:
        found: Ints = self._room[chunks] * self._width + offsets - self._low[chunks]
        return found

    def close(self) -> None:
        """Leave the memory to the next ring."""
        self._spare.give(self._map)


class Cache:
    """The page cache, warmed in large requests; what was read stays for the next epochs."""

    def __init__(self, job: Job) -> None:
        """Nothing is read yet."""
        self._source, self._chunks = job.source, job.chunks
        self._memory = job.source.mapped()
        self._warm = np.zeros(len(job.chunks), np.bool_)
        self.most = 2**31

    def fits(self, chunks: Ints) -> NDArray[np.bool_] | None:
        """All do."""
        return None

    def reserve(self, chunks: Ints, ends: Ints, turn: int, done: int) -> list[int] | None:
        """Those not read yet must be read; there is always room."""
        missing = chunks[~self._warm[chunks]]
        self._warm[missing] = True
        return [int(one) for one in missing]

    def fill(self, chunk: int) -> tuple[int, int]:
        """Have the system read a chunk, and wait until it has."""
        low, high = int(self._chunks.low[chunk]), int(self._chunks.high[chunk])
        self._source.bring(self._memory, low, high)
        return high - low, 1

    def gather(self, chunks: Ints, offsets: Ints, lengths: Ints) -> Bytes:
        """From the file, which is mapped."""
        return self._source.gather(offsets, lengths)

    def copy(self, out: Bytes, starts: Ints, chunks: Ints, offsets: Ints, lengths: Ints) -> None:
        """From the file, which is mapped."""
        data = self._source.gather(offsets, lengths)
        copy_records(out, starts, data, np.cumsum(lengths) - lengths, lengths)

    def close(self) -> None:
        """There is nothing to give back."""
