"""A few threads that read, and the results one can wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from time import perf_counter_ns
from typing import NamedTuple

from sapwood.errors import DeadlineError
from sapwood.runtime.worker import Worker

__all__ = ["Pool", "Read"]


class Read(NamedTuple):
    """A read that was done: its bytes, and when."""

    nbytes: int
    requests: int
    start_ns: int
    end_ns: int


class Pool:
    """Threads that take turns; each does its reads in order."""

    def __init__(self, threads: int, timeout: float) -> None:
        """Start the threads; a result is waited for ``timeout`` seconds."""
        self._workers = [Worker(f"sapwood-read-{number}") for number in range(threads)]
        self._timeout = timeout
        self._next = 0

    def submit(self, act: Callable[[], tuple[int, int]]) -> Future[Read]:
        """Have ``act`` read; it gives the bytes it read, and in how many requests."""
        answer: Future[Read] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            start = perf_counter_ns()
            try:
                nbytes, count = act()
            except BaseException as error:
                # The one who waits for this read gets it; the thread goes on to the next.
                answer.set_exception(error)
            else:
                answer.set_result(Read(nbytes, count, start, perf_counter_ns()))

        worker = self._workers[self._next]
        self._next = (self._next + 1) % len(self._workers)
        worker.submit(job)
        return answer

    def wait(self, answer: Future[Read]) -> Read:
        """The result of a read.

        Raises:
            DeadlineError: it did not come in time.
        """
        try:
            return answer.result(self._timeout)
        except Overdue:
            raise DeadlineError(
                f"a read has taken more than {self._timeout:g} s; the disk does not answer, or "
                "timeout is too short for it"
            ) from None

    def close(self) -> None:
        """End the threads after the read each is at."""
        for worker in self._workers:
            worker.close()
