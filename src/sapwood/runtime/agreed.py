"""Agreeing on a step to come, on all ranks, without a round trip in any step.

Any rank may ask. A thread of each rank hears of it through the group's store and makes a promise:
"I do not pass step p before I know which step it is", where p is the first this rank has not passed
yet. The agreed step is the largest promise: nobody has passed it, as each rank stops at its own
promise, which is not larger. A rank that waits there waits for threads only, never for a training
thread, which may itself be in a collective that needs this rank. While nobody asks, a step costs
one lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sapwood.errors import DeadlineError, SapwoodError
from sapwood.runtime.group import Group

__all__ = ["AgreedStep"]

log = logging.getLogger(__name__)
_NEVER = "never"
_PATIENCE = 2.0
_SLICE = 0.5


class AgreedStep:
    """The step all ranks agreed on, round after round; ``close`` ends its thread.

    Steps are counted by calls of ``reach``, the same on every rank whatever is restored meanwhile.
    """

    def __init__(
        self,
        group: Group,
        key: str,
        *,
        what: str,
        when: Callable[[], str | None] = lambda: None,
        ahead: Callable[[], int] = lambda: 0,
        hopeless: Callable[[], None] = lambda: None,
        poll: float = 0.5,
        timeout: float | None = None,
    ) -> None:
        """Nobody has asked yet.

        Args:
            group: the ranks.
            key: where in the group's store.
            what: what is agreed on, for errors.
            when: looked at often, on any thread: a reason to ask, once there is one.
            ahead: how many steps more to leave others time to hear of it before anyone waits.
            hopeless: called on the thread when a rank failed or left before all had promised.
            poll: seconds between looks at the store.
            timeout: seconds to wait for promises of all ranks; the group's by default.
        """
        self._group, self._key, self._what = group, key, what
        self._when, self._ahead, self._poll = when, ahead, poll
        self._hopeless = hopeless
        self._timeout = group.timeout if timeout is None else timeout
        self._lock = threading.Lock()
        self._count = 0
        self._round = 0
        self._reason: str | None = None
        self._promise: int | None = None
        self._at: int | None = None
        self._settled = threading.Event()
        self._closed = False
        # Signal handlers call `ask`: putting into this queue is safe even inside another put.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if group.world > 1:
            self._thread = threading.Thread(target=self._loop, name=f"sapwood-{key}", daemon=True)
            self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def reason(self) -> str | None:
        """Why it was asked for, as far as this rank knows; None: it was not."""
        return self._reason

    def ask(self, reason: str) -> None:
        """Ask for a step, the next possible one. Returns at once; a signal handler may call it."""
        self._reason = self._reason or reason
        self._wake.put(None)

    def reach(self) -> int | None:
        """This rank comes to the next step: how many are left to the agreed one, 0 if it is this.

        None while nothing is agreed on. It waits only if this rank has promised to.

        Raises:
            PeerFailed: a rank failed, or did not answer in time.
        """
        if self._thread is None and self._reason is None:
            self._reason = self._when()
        with self._lock:
            if self._thread is None and self._reason is not None and self._at is None:
                self._at = self._count + 1 + self._ahead()
            self._count += 1
            waits = self._promise is not None and self._count >= self._promise
        if waits and not self._settled.is_set():
            self._wait()
        return None if self._at is None else max(self._at - self._count, 0)

    def renew(self) -> None:
        """Begin another round: the step that was agreed on is over. All ranks must do the same."""
        with self._lock:
            self._round += 1
            self._reason = self._promise = self._at = None
            self._settled = threading.Event()

    def close(self) -> None:
        """End the thread; ranks that wait for this one's promise learn that there will be none."""
        if self._closed:
            return
        self._closed = True
        self._wake.put(None)
        if self._thread is None:
            return
        if not self._group.failed and not self._settled.is_set():
            try:
                place = self._place("at", self._round)
                self._group.store.compare_set(place, "", _NEVER, timeout=_PATIENCE)
            except (SapwoodError, RuntimeError) as error:
                log.info("%s: the group is gone: %s", self._what, error)
        self._thread.join(5.0)

    # -- on the training thread ----------------------------------------------------------------

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._settled.wait(_SLICE):
            self._group.check_peers(self._what)
            if time.monotonic() > deadline:
                raise self._group.silent(self._what)

    # -- on the thread of this object ----------------------------------------------------------

    def _loop(self) -> None:
        while not self._closed:
            with suppress(queue.Empty):
                self._wake.get(timeout=self._poll)
            try:
                self._look()
            except DeadlineError:
                continue  # the store's host is slow; the next look may be luckier
            except (SapwoodError, RuntimeError) as error:
                # The training itself hears of it; nobody shall wait for what cannot come.
                log.info("%s: the group is gone: %s", self._what, error)
                self._settled.set()
                return

    def _look(self) -> None:
        with self._lock:
            round, promised, settled = self._round, self._promise is not None, self._settled
        if settled.is_set() or self._closed:
            return
        if not promised:
            self._reason = self._reason or self._when()
            if self._reason is None and not self._group.store.has(self._place("asked", round)):
                return
            self._hear(round)
        place = self._place("at", round)
        while not self._closed:
            if self._group.store.wait(place, self._poll):
                text = self._group.store.get(place).decode()
                with self._lock:
                    if round == self._round:
                        self._at = None if text == _NEVER else int(text)
                        settled.set()
                if text == _NEVER:
                    self._hopeless()
                return
            if self._group.board.read(self._group.step) is not None:
                settled.set()
                self._hopeless()
                return

    def _hear(self, round: int) -> None:
        """Somebody asked: let all know why, and promise."""
        store = self._group.store
        said = store.compare_set(self._place("asked", round), "", self._reason or "").decode()
        with self._lock:
            if round != self._round:
                return
            self._reason = said or self._reason
            self._promise = mine = self._count + 1 + self._ahead()
        # The largest promise is there before the last rank is counted.
        there = store.compare_set(self._place("most", round), "", str(mine)).decode()
        while int(there) < mine:
            there = store.compare_set(self._place("most", round), there, str(mine)).decode()
        if store.add(self._place("promised", round), 1) == self._group.world:
            most = store.get(self._place("most", round)).decode()
            store.compare_set(self._place("at", round), "", most)

    def _place(self, name: str, round: int) -> str:
        return f"{self._key}/{round}/{name}"
