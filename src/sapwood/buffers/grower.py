"""Grows a pool's memory: ahead of need on a thread of its own, or at once for who needs it now."""

from __future__ import annotations

import logging
import threading
import time

from sapwood.buffers.mapping import HUGE_PAGE
from sapwood.buffers.policies import Growth, Policy
from sapwood.errors import DeadlineError, NoRoom, StorageError, UsageError

__all__ = ["Grower"]

_log = logging.getLogger(__name__)
_STEP = 64 * 2**20
"""Grown at a time ahead of need: whoever needs memory now waits for no more than one such step."""
_PATIENCE = 1.0


class Grower:
    """Lets one thread grow memory at a time, without the pool's lock; the pool closes it.

    Every method but ``close`` is called with the lock of ``changed`` held.
    """

    def __init__(
        self, memory: Policy, changed: threading.Condition, *, limit: int, headroom: int, name: str
    ) -> None:
        self.headroom = headroom
        """The length of the run that is to be free at any time."""
        self.stuck = ""
        """Why growing failed; it is not tried again ahead of need until something was released."""
        self.ahead = self.late = 0
        """Bytes grown before they were needed, and while somebody waited."""
        self._memory = memory
        self._changed = changed
        self._limit = limit
        self._name = name
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def spare(self) -> int:
        """What the limit still allows."""
        return (self._limit - self._memory.reserved) // HUGE_PAGE * HUGE_PAGE

    def grow(self, nbytes: int, *, joined: bool = True) -> bool:
        """Have a run of that length, or that much more, now; False if that cannot be.

        True means that something changed, and the caller looks again: others are as quick.
        """
        if self._busy:
            self._changed.wait(_PATIENCE)
            if self._closed:
                raise UsageError("this pool of shared memory was closed meanwhile")
            return True
        growth = self._memory.plan(nbytes, joined=joined) if nbytes > 0 else None
        if growth is None or not self._carry_out(growth):
            return False
        self.late += growth.nbytes
        return True

    def look_ahead(self) -> None:
        """Begin to grow, if the headroom is not there and can be had."""
        if self._closed or self.stuck or self._thread is not None or not self._lacking():
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()  # it begins with the lock, so not before the next line
        self._thread = thread

    def wait(self, timeout: float) -> None:
        """Until nothing is grown ahead any more.

        Raises:
            DeadlineError: it took longer.
        """
        deadline = time.monotonic() + timeout
        while self._thread is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"memory was not prepared within {timeout:g} s")
            self._changed.wait(left)

    def close(self) -> None:
        """End the thread; it may be in the middle of a step."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            while self._busy:  # an allocation of another thread
                self._changed.wait(_PATIENCE)

    def _lacking(self) -> Growth | None:
        if self._memory.largest >= self.headroom:
            return None
        return self._memory.plan(self.headroom)

    def _run(self) -> None:
        with self._changed:
            try:
                while not self._closed:
                    if self._busy:
                        self._changed.wait(_PATIENCE)
                        continue
                    growth = self._lacking()
                    if growth is None:
                        break
                    step = growth._replace(nbytes=min(growth.nbytes, _STEP))
                    if not self._carry_out(step):
                        _log.warning("memory for the next save is not prepared: %s", self.stuck)
                        break
                    self.ahead += step.nbytes
            except StorageError as error:  # it is raised to whoever allocates next
                self.stuck = str(error)
                _log.warning("memory for the next save cannot be prepared: %s", error)
            finally:
                self._thread = None
                self._changed.notify_all()

    def _carry_out(self, growth: Growth) -> bool:
        self._busy = True
        self._changed.release()
        segment, stuck = None, ""
        try:
            segment = self._memory.carry_out(growth)
        except NoRoom as error:
            stuck = str(error)
        finally:
            self._changed.acquire()
            self._busy = False
            self.stuck = stuck
            if segment is not None:
                self._memory.account(growth, segment)
            self._changed.notify_all()
        return segment is not None
