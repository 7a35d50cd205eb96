"""A background thread that runs jobs in order and never swallows an error."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from sapwood.errors import DeadlineError, UsageError

__all__ = ["Worker"]

log = logging.getLogger(__name__)
Job = Callable[[], None]


class Worker:
    """Runs submitted jobs one after the other; the first error stops it and is raised to the owner.

    The owner calls ``submit`` and ``drain``, which raise what a job raised, and at last ``close``,
    which never raises, so that it can stand among other cleaning up; ``error`` still tells.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        """Start the thread; ``on_error`` is told of the error at once, on the thread."""
        self._on_error = on_error
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._open_jobs = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What a job raised, if one did; jobs after it were not run."""
        return self._error

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self.check()
        with self._idle:
            if self._closed:
                raise UsageError(f"{self._thread.name} is closed and takes no more jobs")
            self._open_jobs += 1
            self._jobs.put(job)

    def is_current(self) -> bool:
        """Whether the caller runs on this worker's thread."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise what a job raised, if one did."""
        if self._error is not None:
            raise self._error

    def drain(self, timeout: float) -> None:
        """Wait until every submitted job is done.

        Raises:
            DeadlineError: they were not done in ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._idle:
            while self._open_jobs and self._error is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"{self._thread.name} still had {self._open_jobs} jobs after {timeout:g} s"
                    )
                self._idle.wait(left)
        self.check()

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread after the jobs it has; False when it did not end in time."""
        with self._idle:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if self.is_current():  # an owner that was lost, found by the collector on this thread
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
                self._tell(error)
            finally:
                del job
                with self._idle:
                    self._open_jobs -= 1
                    if not self._open_jobs or self._error is not None:
                        self._idle.notify_all()

    def _tell(self, error: BaseException) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception:
            # The job's own error is the one the owner must see, and the thread must live to say so.
            log.exception("%s: on_error raised", self._thread.name)
