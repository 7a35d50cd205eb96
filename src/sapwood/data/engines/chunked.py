"""Large reads of whole chunks, ahead of the batches that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import TYPE_CHECKING

from sapwood.data.engines.base import Bytes, Ints, Job
from sapwood.data.engines.pool import Pool, Read
from sapwood.data.engines.ring import Home
from sapwood.data.engines.turns import Planner, Turn

if TYPE_CHECKING:
    from sapwood.data.stagger import Gate

__all__ = ["Chunked"]


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


class _Run:
    """One walk through the batches."""

    def __init__(self, job: Job, home: Home, wanted: Iterator[Ints], gate: Gate | None) -> None:
        self._job, self._home, self._wanted, self._gate = job, home, wanted, gate
        # With a gate there is one thread, so that what is read lies between entering and leaving.
        threads = job.settings.threads if gate is None else 1
        self._pool = Pool(threads, job.settings.timeout, self._note)
        self._planner = Planner(job, home)
        self._step = max(job.settings.ahead // 2, 1)
        self._batches: deque[int] = deque()
        """How many turns each batch has that was planned."""
        self._waiting: deque[Turn] = deque()
        """Turns without room yet."""
        self._ready: deque[Turn] = deque()
        """Turns whose chunks are there, or being read."""
        self._begun = self._done = 0

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
            turns = self._batches.popleft()
            data = self._take(self._ready.popleft())
            for _ in range(turns - 1):
                self._advance()
                data = self._take(self._ready.popleft())
            yield data

    def _advance(self) -> None:
        """Plan batches, and begin the reads there is room for."""
        limit = self._job.settings.ahead - self._step
        while True:
            while self._waiting and self._begin(self._waiting[0]):
                self._ready.append(self._waiting.popleft())
            if self._waiting or len(self._batches) > limit:
                return
            group = list(islice(self._wanted, self._step))
            if not group:
                return
            for turns in self._planner.plan(group):
                self._waiting.extend(turns)
                self._batches.append(len(turns))

    def _begin(self, turn: Turn) -> bool:
        """Begin the reads of a turn; False if it has to wait for room."""
        missing: list[int] = []
        if not turn.long:
            found = self._home.reserve(turn.needed, turn.ends, self._begun, self._done)
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

    def _take(self, turn: Turn) -> Bytes:
        """The memory of a batch, with the records of this turn in it."""
        if self._pool.done < turn.upto:
            with self._job.recorder.waiting():
                self._pool.wait(turn.upto)
        start = perf_counter_ns()
        data = self._long(turn) if turn.long else self._copy(turn)
        self._done += 1
        self._job.recorder.stats.gather_seconds += (perf_counter_ns() - start) / 1e9
        return data

    def _copy(self, turn: Turn) -> Bytes:
        if turn.data is None or turn.starts is None:
            return self._home.gather(turn.chunks, turn.offsets, turn.lengths)
        self._home.copy(turn.data, turn.starts, turn.chunks, turn.offsets, turn.lengths)
        return turn.data

    def _long(self, turn: Turn) -> Bytes:
        assert turn.data is not None
        assert turn.starts is not None
        source, recorder = self._job.source, self._job.recorder
        view = memoryview(turn.data)  # type: ignore[arg-type]
        rows = (turn.starts, turn.offsets, turn.lengths)
        for start, offset, length in zip(*(one.tolist() for one in rows), strict=True):
            began = perf_counter_ns()
            with recorder.waiting():
                source.read_into(source.fd, view[start : start + length], offset, length)
            recorder.request(length, began, perf_counter_ns())
        return turn.data
