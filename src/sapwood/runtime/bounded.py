"""A group's store whose every call ends in time.

torch waits for a store's answer without limit, so a stopped host would stop every rank that only
wants to know how the others are. Here calls run on a thread of their own, which may get stuck.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from typing import Any, TypeVar

from sapwood.errors import DeadlineError, UsageError
from sapwood.runtime.stores import Store

__all__ = ["BoundedStore"]

T = TypeVar("T")
# Asking again is cheap for the one that asks, but one host may answer a thousand ranks. Its time
# for a waiting rank bounds how soon each of them asks again.
_TIME_TO_ANSWER = 0.0001
_LONGEST_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.25

_Task = tuple[Callable[[], Any], "Future[Any]"]


class BoundedStore:
    """The calls of a store, each given up after ``timeout`` seconds or the group's timeout.

    Raises:
        DeadlineError: the process that hosts the store did not answer in time.
    """

    def __init__(self, store: Store, timeout: float, *, ranks: int) -> None:
        """Give up after ``timeout`` seconds unless a call says otherwise; ``ranks`` may wait."""
        self._store = store
        self._timeout = timeout
        self._first_pause = min(_TIME_TO_ANSWER * ranks, _LONGEST_FIRST_PAUSE)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def set(self, key: str, text: str, *, timeout: float | None = None) -> None:
        """Write ``text``."""
        self._call(lambda: self._store.set(key, text), timeout)

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Read what is there; ask ``has`` first."""
        value: bytes = self._call(lambda: self._store.get(key), timeout)
        return value

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return self._call(lambda: int(self._store.add(key, amount)), timeout)

    def has(self, key: str, *, timeout: float | None = None) -> bool:
        """Whether ``key`` was written."""
        return self._call(lambda: bool(self._store.check([key])), timeout)

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Forget ``key``; whether it was there."""
        return self._call(lambda: bool(self._store.delete_key(key)), timeout)

    def compare_set(
        self, key: str, expected: str, text: str, *, timeout: float | None = None
    ) -> bytes:
        """Write ``text`` if ``expected`` is there ("": nothing); return what then is there."""
        act = self._store.compare_set
        value: bytes = self._call(lambda: act(key, expected, text), timeout)
        return value

    def wait(self, key: str, timeout: float) -> bool:
        """Wait until ``key`` is written; False when ``timeout`` seconds passed first."""
        deadline = time.monotonic() + timeout
        pause = self._first_pause
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self.has(key, timeout=left):
                    return True
            except DeadlineError:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_PAUSE)
        return False

    def close(self) -> None:
        """End the thread, or leave it behind if the store's host does not answer."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._tasks.put(None)
            thread.join(1.0)

    def _call(self, act: Callable[[], T], timeout: float | None = None) -> T:
        seconds = self._timeout if timeout is None else timeout
        self._start()
        answer: Future[T] = Future()
        self._tasks.put((act, answer))
        try:
            return answer.result(seconds)
        except Overdue:
            # What was not begun must not be done later, when nobody expects it any more.
            if not answer.cancel() and answer.done():
                return answer.result()
            raise DeadlineError(
                f"the group's store has not answered for {seconds:g} s; the process that hosts it, "
                "rank 0 or the launcher, is stopped or cut off"
            ) from None

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise UsageError("the group is closed; join it again to go on")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="sapwood-store", daemon=True
                )
                self._thread.start()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            act, answer = task
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)
            del task, act, answer
