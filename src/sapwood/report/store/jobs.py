"""Long work for the page: a few at a time, and ended when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from sapwood.errors import StoreError

__all__ = ["Cancelled", "Job", "Jobs", "Kept"]

T = TypeVar("T")
_AT_ONCE = 2
_WAITING = 16
_FIRST_TICK, _TICK = 0.005, 0.1


class Cancelled(Exception):
    """Nobody waits for the result."""


class Job(Generic[T]):
    """One piece of work. It calls ``advance`` often, which ends it once it was cancelled."""

    def __init__(self, work: Callable[[Job[T]], T]) -> None:
        """Begun by ``Jobs``."""
        self._work = work
        self._cancelled = threading.Event()
        self.state: tuple[int, int, str] = (0, 0, "")
        """Bytes that are done, of how many, and what is being done."""
        self.future: Future[T]

    def run(self) -> T:
        """In a thread of ``Jobs``."""
        self.advance(*self.state)
        return self._work(self)

    def advance(self, done: int, total: int, what: str) -> None:
        """Say how far it is.

        Raises:
            Cancelled: it was.
        """
        if self._cancelled.is_set():
            raise Cancelled
        self.state = (done, total, what)

    def cancel(self) -> None:
        """End it as soon as it says how far it is."""
        self._cancelled.set()
        self.future.cancel()

    async def until_done(self) -> AsyncIterator[tuple[int, int, str]]:
        """How far it is, now and then, until it is done; cancels it if left before."""
        tick = _FIRST_TICK
        try:
            while not self.future.done():
                yield self.state
                await asyncio.sleep(tick)
                tick = min(2 * tick, _TICK)
        finally:
            if not self.future.done():
                self.cancel()

    def result(self) -> T:
        """What was found, once it is done.

        Raises:
            Cancelled: it was, before or while it ran.
        """
        try:
            return self.future.result(timeout=0)
        except CancelledError:
            raise Cancelled from None


class Jobs:
    """Owns the threads; ``close`` ends them."""

    def __init__(self) -> None:
        """No thread runs before there is work."""
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sapwood-page")
        self._lock = threading.Lock()
        self._running: set[Job[Any]] = set()
        self._closed = False

    def start(self, work: Callable[[Job[T]], T]) -> Job[T]:
        """Begin work, or queue it.

        Raises:
            StoreError: too much is waiting already.
        """
        job = Job(work)
        with self._lock:
            if self._closed:
                raise StoreError("the server is being closed")
            if len(self._running) >= _WAITING:
                raise StoreError("too much is being computed already; try again in a moment")
            self._running.add(job)
            job.future = self._pool.submit(job.run)
        job.future.add_done_callback(lambda _: self._forget(job))
        return job

    def close(self) -> None:
        """Cancel everything and return when it has ended. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for job in running:
            job.cancel()
        self._pool.shutdown(wait=True)

    def _forget(self, job: Job[Any]) -> None:
        with self._lock:
            self._running.discard(job)


class Kept(Generic[T]):
    """The last few results; versions never change, so none is ever wrong."""

    def __init__(self, most: int) -> None:
        """``most``: how many are kept."""
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """What was kept; None if it is not any more."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def keep(self, key: Hashable, value: T) -> T:
        """Keep it in place of the one that nobody asked for the longest."""
        with self._lock:
            self._found[key] = value
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return value
