"""Large reads of whole chunks, ahead of the batches that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.engines.pool import Pool, Read
from sapwood.data.engines.ring import Home
from sapwood.data.gather import copy_records, gather_records

if TYPE_CHECKING:
    from sapwood.data.stagger import Gate

__all__ = ["Chunked"]


@dataclass(kw_only=True)
class _Turn:
    """Records whose chunks are in memory at the same time: a batch, or a part of a large one."""

    batch: int
    rows: Ints | None
    """Which rows of the batch they are; None is all of them."""
    chunks: Ints
    """The chunk of each."""
    needed: Ints
    """The same, each once."""
    offsets: Ints
    lengths: Ints
    last: bool = True
    """No other turn of the batch follows."""
    long: bool = False
    """Their chunks are too long for a buffer; they are read one by one."""
    upto: int = 0
    """The reads below this number must be done before."""


@dataclass(frozen=True, kw_only=True)
class _Planned:
    lengths: Ints
    turns: int


class Chunked:
    """Plan some batches ahead, have threads read the chunks they need, and gather from those.

    All planning is done on the thread that asks for batches, whenever it does, for several batches
    at once; the other threads only read. So there are no locks, and what is in flight goes on while
    a batch is trained on.
    """

    name = "chunked"

    def __init__(self, job: Job, home: Home, gate: Gate | None = None) -> None:
        """``home`` is where chunks are kept; ``gate`` says when they may be read."""
        self._job, self._home, self._gate = job, home, gate

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        run = _Run(self._job, self._home, wanted, self._gate)
        try:
            yield from run.batches()
        finally:
            run.close()


def _only(batch: _Turn, needed: Ints) -> _Turn:
    """The part of a batch that is in these chunks."""
    rows = np.flatnonzero(np.isin(batch.chunks, needed))
    return _Turn(
        batch=batch.batch,
        rows=rows,
        chunks=batch.chunks[rows],
        needed=needed,
        offsets=batch.offsets[rows],
        lengths=batch.lengths[rows],
        last=False,
    )


class _Run:
    """One walk through the batches."""

    def __init__(self, job: Job, home: Home, wanted: Iterator[Ints], gate: Gate | None) -> None:
        self._job, self._home, self._wanted, self._gate = job, home, wanted, gate
        # With a gate there is one thread, so that what is read lies between entering and leaving.
        threads = job.settings.threads if gate is None else 1
        self._pool = Pool(threads, job.settings.timeout, self._note)
        self._step = max(job.settings.ahead // 2, 1)
        self._batches: deque[_Planned] = deque()
        self._waiting: deque[_Turn] = deque()
        """Turns without room yet."""
        self._ready: deque[_Turn] = deque()
        self._planned = self._begun = self._done = 0

    def close(self) -> None:
        if self._pool.close():
            self._home.close()
        if self._gate is not None:
            self._gate.leave()

    def batches(self) -> Generator[Bytes, None, None]:
        while True:
            self._advance()
            if not self._batches:
                return
            batch = self._batches.popleft()
            if batch.turns == 1 and self._ready[0].rows is None and not self._ready[0].long:
                data = self._whole(self._ready.popleft())
            else:
                data = np.empty(int(batch.lengths.sum()), np.uint8)
                starts = np.cumsum(batch.lengths) - batch.lengths
                for _ in range(batch.turns):
                    self._advance()
                    self._part(data, starts, self._ready.popleft())
            yield data

    def _advance(self) -> None:
        """Plan batches, and begin the reads there is room for."""
        limit = self._job.settings.ahead - self._step
        while True:
            while self._waiting and self._begin(self._waiting[0]):
                self._ready.append(self._waiting.popleft())
            if self._waiting or len(self._batches) > limit or not self._plan():
                return

    def _plan(self) -> bool:
        """Plan some batches at once, which costs hardly more than one; False if there are none."""
        group = list(islice(self._wanted, self._step))
        if not group:
            return False
        job, sizes = self._job, [len(one) for one in group]
        offsets, lengths = job.places(np.concatenate(group))
        chunks = job.chunks.holding(offsets)
        every = max(len(job.chunks), 1)
        marks = np.unique(np.repeat(np.arange(len(group)) * every, sizes) + chunks)
        bounds = np.searchsorted(marks, np.arange(len(group) + 1) * every).tolist()
        needed, low = marks % every, 0
        fits = self._home.fits(needed)
        for number, size in enumerate(sizes):
            mine, rows = slice(bounds[number], bounds[number + 1]), slice(low, low + size)
            low += size
            batch = _Turn(
                batch=self._planned,
                rows=None,
                chunks=chunks[rows],
                needed=needed[mine],
                offsets=offsets[rows],
                lengths=lengths[rows],
            )
            turns = self._turns(batch, None if fits is None else fits[mine])
            self._planned += 1
            self._waiting.extend(turns)
            self._batches.append(_Planned(lengths=batch.lengths, turns=len(turns)))
        return True

    def _turns(self, batch: _Turn, fits: NDArray[np.bool_] | None) -> list[_Turn]:
        """A batch in as many parts as there must be for each to find room."""
        needed, most = batch.needed, self._home.most
        if len(needed) <= most and (fits is None or fits.all()):
            return [batch]
        long = needed[:0] if fits is None else needed[~fits]
        short = needed if fits is None else needed[fits]
        count = -(-len(short) // most)
        turns = [_only(batch, one) for one in np.array_split(short, count)] if count else []
        if len(long):
            turns.append(replace(_only(batch, long), long=True))
        turns[-1] = replace(turns[-1], last=True)
        return turns

    def _begin(self, turn: _Turn) -> bool:
        """Begin the reads of a turn; False if it has to wait for room."""
        missing: list[int] = []
        if not turn.long:
            found = self._home.reserve(turn.needed, self._begun, self._done)
            if found is None:
                return False
            missing = found
        if self._gate is not None and missing:
            self._pool.submit(partial(self._admit, self._gate, turn.batch))
        for chunk in missing:
            self._pool.submit(partial(self._home.fill, chunk))
        turn.upto = self._pool.asked
        if self._gate is not None and turn.last:
            nbytes = len(missing) * self._job.chunks.nbytes
            self._pool.submit(partial(self._release, self._gate, turn.batch, nbytes))
        self._begun += 1
        return True

    def _admit(self, gate: Gate, batch: int) -> tuple[int, int]:
        start = perf_counter_ns()
        gate.admit(batch)
        # This thread alone counts it.
        self._job.recorder.stats.stagger_seconds += (perf_counter_ns() - start) / 1e9
        return 0, 0

    def _release(self, gate: Gate, batch: int, nbytes: int) -> tuple[int, int]:
        gate.release(batch, nbytes)
        return 0, 0

    def _note(self, read: Read) -> None:
        if read.requests:
            self._job.recorder.request(read.nbytes, read.start_ns, read.end_ns, read.requests)

    def _await(self, turn: _Turn) -> None:
        if self._pool.done < turn.upto:
            with self._job.recorder.waiting():
                self._pool.wait(turn.upto)

    def _whole(self, turn: _Turn) -> Bytes:
        self._await(turn)
        start = perf_counter_ns()
        memory, places = self._home.locate(turn.chunks, turn.offsets)
        data = gather_records(memory, places, turn.lengths, self._job.index.width)
        self._finish(start)
        return data

    def _part(self, data: Bytes, starts: Ints, turn: _Turn) -> None:
        assert turn.rows is not None
        if turn.long:
            self._long(data, starts[turn.rows], turn)
            self._finish(perf_counter_ns())
            return
        self._await(turn)
        start = perf_counter_ns()
        memory, places = self._home.locate(turn.chunks, turn.offsets)
        copy_records(data, starts[turn.rows], memory, places, turn.lengths)
        self._finish(start)

    def _long(self, data: Bytes, starts: Ints, turn: _Turn) -> None:
        source, recorder = self._job.source, self._job.recorder
        view = memoryview(data)  # type: ignore[arg-type]
        for start, offset, length in zip(
            starts.tolist(), turn.offsets.tolist(), turn.lengths.tolist(), strict=True
        ):
            began = perf_counter_ns()
            with recorder.waiting():
                source.read_into(source.fd, view[start : start + length], offset, length)
            recorder.request(length, began, perf_counter_ns())

    def _finish(self, start_ns: int) -> None:
        self._done += 1
        self._job.recorder.stats.gather_seconds += (perf_counter_ns() - start_ns) / 1e9
