"""Large reads of whole chunks, ahead of the batches that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

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
    reads: list[Future[Read]] = field(default_factory=list)
    admitted: Future[Read] | None = None


@dataclass(frozen=True, kw_only=True)
class _Planned:
    lengths: Ints
    turns: int


class Chunked:
    """Plan some batches ahead, have threads read the chunks they need, and gather from those.

    All planning is done on the thread that asks for batches, whenever it does; the other threads
    only read. So there are no locks, and what is in flight goes on while a batch is trained on.
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
        self._pool = Pool(job.settings.threads if gate is None else 1, job.settings.timeout)
        self._batches: deque[_Planned] = deque()
        self._waiting: deque[_Turn] = deque()
        """Turns without room yet."""
        self._ready: deque[_Turn] = deque()
        self._planned = self._begun = self._done = 0
        self._reading: dict[int, Future[Read]] = {}
        """Reads of chunks that nobody has waited for yet."""

    def close(self) -> None:
        for read in self._reading.values():
            read.cancel()
        self._pool.close()
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
        limit = self._job.settings.ahead
        while True:
            while self._waiting and self._begin(self._waiting[0]):
                self._ready.append(self._waiting.popleft())
            if self._waiting or len(self._batches) >= limit:
                return
            records = next(self._wanted, None)
            if records is None:
                return
            self._plan(records)

    def _plan(self, records: Ints) -> None:
        offsets, lengths = self._job.places(records)
        chunks = self._job.chunks.holding(offsets)
        needed = np.unique(chunks)
        fits = self._home.fits(needed)
        batch = _Turn(
            batch=self._planned,
            rows=None,
            chunks=chunks,
            needed=needed,
            offsets=offsets,
            lengths=lengths,
        )
        if fits.all() and len(needed) <= self._home.most:
            turns = [batch]
        else:
            count = -(-int(fits.sum()) // self._home.most)
            groups = np.array_split(needed[fits], count) if count else []
            turns = [_only(batch, one) for one in groups]
            if not fits.all():
                turns.append(replace(_only(batch, needed[~fits]), long=True))
            turns[-1] = replace(turns[-1], last=True)
        self._planned += 1
        self._waiting.extend(turns)
        self._batches.append(_Planned(lengths=lengths, turns=len(turns)))

    def _begin(self, turn: _Turn) -> bool:
        """Begin the reads of a turn; False if it has to wait for room."""
        nbytes = 0
        if not turn.long:
            missing = self._home.reserve(turn.needed, self._begun, self._done)
            if missing is None:
                return False
            nbytes += len(missing) * self._job.chunks.nbytes
            if self._gate is not None and len(missing):
                turn.admitted = self._pool.submit(partial(self._admit, turn.batch))
            for chunk in missing.tolist():
                self._reading[chunk] = self._pool.submit(partial(self._home.fill, chunk))
            if self._reading:
                turn.reads = [
                    self._reading[one] for one in turn.needed.tolist() if one in self._reading
                ]
        if self._gate is not None and turn.last:
            self._pool.submit(partial(self._release, turn.batch, nbytes))
        self._begun += 1
        return True

    def _admit(self, batch: int) -> tuple[int, int]:
        assert self._gate is not None
        self._gate.admit(batch)
        return 0, 0

    def _release(self, batch: int, nbytes: int) -> tuple[int, int]:
        assert self._gate is not None
        self._gate.release(batch, nbytes)
        return 0, 0

    def _await(self, turn: _Turn) -> None:
        recorder = self._job.recorder
        if turn.admitted is not None:
            admitted = self._pool.wait(turn.admitted)
            waited = admitted.end_ns - admitted.start_ns
            recorder.stats.stagger_seconds += waited / 1e9
        if not all(one.done() for one in turn.reads):
            with recorder.waiting():
                for one in turn.reads:
                    self._pool.wait(one)
        if not turn.reads:
            return
        for chunk in turn.needed.tolist():
            read = self._reading.pop(chunk, None)
            if read is not None:
                done = self._pool.wait(read)
                recorder.request(done.nbytes, done.start_ns, done.end_ns, done.requests)

    def _whole(self, turn: _Turn) -> Bytes:
        self._await(turn)
        start = perf_counter_ns()
        memory, places = self._home.locate(turn.chunks, turn.offsets)
        data = gather_records(memory, places, turn.lengths)
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
