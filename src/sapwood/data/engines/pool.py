"""A few threads that read, and results one waits for in the order in which reads were asked for."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from time import perf_counter_ns
from typing import NamedTuple

from sapwood.errors import DeadlineError
from sapwood.runtime.worker import Worker

__all__ = ["Pool", "Read"]

_PATIENCE = 5.0
Act = Callable[[], tuple[int, int]]


class Read(NamedTuple):
    """A read that was done: its bytes, and when."""

    nbytes: int
    requests: int
    start_ns: int
    end_ns: int


class Pool:
    """Threads that take reads from one queue, the oldest first.

    Reads are numbered as they are asked for. One waits for all below a number, which costs next to
    nothing when they are done: a future for each would cost more than the read of a small chunk.
    """

    def __init__(
        self, threads: int, timeout: float, note: Callable[[Read], None] = lambda read: None
    ) -> None:
        """Start the threads; ``note`` is called by those who wait, with each read in its turn."""
        self._jobs: queue.SimpleQueue[tuple[int, Act] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Read | BaseException]] = queue.SimpleQueue()
        self._early: dict[int, Read | BaseException] = {}
        self._timeout, self._note = timeout, note
        self._closing = False
        self.asked = 0
        """How many reads were asked for."""
        self.done = 0
        """All reads below this number are known to be done."""
        self._workers = [Worker(f"sapwood-read-{number}") for number in range(threads)]
        for worker in self._workers:
            worker.submit(self._serve)

    def submit(self, act: Act) -> None:
        """Have ``act`` read; it gives the bytes it read, and in how many requests."""
        self._jobs.put((self.asked, act))
        self.asked += 1

    def wait(self, upto: int) -> None:
        """Wait until all reads below a number are done.

        Raises:
            DeadlineError: one did not end in time.
        """
        while self.done < upto:
            while self.done not in self._early:
                number, result = self._next()
                self._early[number] = result
            found = self._early.pop(self.done)
            self.done += 1
            if isinstance(found, BaseException):
                raise found
            self._note(found)

    def close(self) -> bool:
        """End the threads after the read each is at; False if one has not ended in time."""
        self._closing = True
        for _ in self._workers:
            self._jobs.put(None)
        deadline = time.monotonic() + _PATIENCE
        ended = [worker.close(max(deadline - time.monotonic(), 0)) for worker in self._workers]
        return all(ended)

    def _next(self) -> tuple[int, Read | BaseException]:
        try:
            return self._results.get(timeout=self._timeout)
        except queue.Empty:
            raise DeadlineError(
                f"a read has taken more than {self._timeout:g} s; the disk does not answer, or "
                "timeout is too short for it"
            ) from None

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            number, act = job
            start = perf_counter_ns()
            try:
                nbytes, count = act()
            except BaseException as error:
                # The one who waits for this read gets it; the thread goes on to the next.
                self._results.put((number, error))
            else:
                self._results.put((number, Read(nbytes, count, start, perf_counter_ns())))
