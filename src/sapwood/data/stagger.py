"""Who may read now: a few of all readers at a time, one after the other in the order of the file.

Many readers at once make a file system jump to and fro. So each reader has a number for each batch,
which goes up with the place in the file, and begins when the one ``size`` places before it has
ended. What the store holds are tokens: the numbers of those that have ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sapwood.data.check import require_instance, require_int
from sapwood.errors import ConfigError, DeadlineError
from sapwood.runtime.bounded import BoundedStore
from sapwood.runtime.stores import PrefixStore, Store

__all__ = ["Gate", "Stagger"]


@dataclass(frozen=True, kw_only=True)
class Stagger:
    """What ``policy="stag"`` needs to know."""

    store: Store
    """The group's store, or any other that all readers reach."""
    size: int = 2
    """How many readers may read at the same time, at first."""
    adapt: int = 64
    """After so many batches another size is tried, and kept if more was read; 0 is never."""

    def __post_init__(self) -> None:
        """Refuse what lets nobody read.

        Raises:
            ConfigError: a number is too small, or of a wrong type.
        """
        require_instance("store", self.store, Store)
        require_int("size", self.size)
        require_int("adapt", self.adapt)
        if self.size < 1 or self.adapt < 0:
            raise ConfigError(
                f"size={self.size}, adapt={self.adapt}: expected a size of 1 or more, and a number "
                "of batches, or 0 for never"
            )


class Gate:
    """One reader's turns; all readers have as many."""

    def __init__(
        self, stagger: Stagger, name: str, *, number: int, readers: int, timeout: float
    ) -> None:
        """``number`` is this reader's among ``readers``; ``name`` is the same for all of them."""
        place = PrefixStore(f"sapwood-data/{name}", stagger.store)
        self._store = BoundedStore(place, timeout, ranks=readers)
        self._number, self._readers, self._timeout = number, readers, timeout
        self._adapt = stagger.adapt
        self._sizes = {0: min(stagger.size, readers)}
        """How many may read at a time, in each period."""
        self._climb = _Climb(self._sizes[0], readers)
        self._began = time.monotonic()
        self._read = 0
        """Bytes, in this period."""
        self._admitted = -1

    def admit(self, batch: int) -> None:
        """Wait until it is this reader's turn; asking again for the same batch does nothing.

        Raises:
            DeadlineError: a reader before it did not end in time.
        """
        if batch == self._admitted or self._readers == 1:
            return
        self._learn_size(batch)
        for before in self._tokens(batch):
            self._wait(batch, before)
            self._store.delete(f"ended/{before}")  # nobody else waits for it
        self._admitted = batch

    def release(self, batch: int, nbytes: int) -> None:
        """Let the next one read; to be called for each batch, whether it needed reading or not.

        Raises:
            DeadlineError: as ``admit``: who skips a turn must not let others in before it.
        """
        if self._readers == 1:
            return
        self.admit(batch)
        self._store.set(f"ended/{batch * self._readers + self._number}", "1")
        self._read += nbytes
        if self._adapt and self._number == 0 and (batch + 1) % self._adapt == 0:
            self._judge((batch + 1) // self._adapt)

    def leave(self) -> None:
        """End the thread that asks the store."""
        self._store.close()

    def _wait(self, batch: int, before: int) -> None:
        """Wait for the reader before this one; in half the time say that one waits, and for whom.

        Whoever waits for this reader follows that to the one that really does not read.
        """
        mine = f"waits/{batch * self._readers + self._number}"
        if self._store.wait(f"ended/{before}", self._timeout / 2):
            return
        self._store.set(mine, str(before))
        if self._store.wait(f"ended/{before}", self._timeout / 2):
            self._store.delete(mine)
            return
        raise self._overdue(before)

    def _overdue(self, turn: int) -> DeadlineError:
        """A turn has not ended: whose fault that is, and not only who comes before."""
        while self._store.has(f"waits/{turn}"):  # for an earlier one, so that there is an end
            turn = int(self._store.get(f"waits/{turn}"))
        who, when = turn % self._readers, turn // self._readers
        return DeadlineError(
            f"reader {who} has not read its part of batch {when} for {self._timeout:g} s, and "
            f"reader {self._number} may not begin before"
        )

    def _tokens(self, batch: int) -> list[int]:
        """Those that let this reader in: each lets in the one that is ``size`` places after it.

        So there is one of them, except where the size changes: there may be none, or two.
        """
        turn, found = batch * self._readers + self._number, []
        for earlier in range(max(batch - 1, 0), batch + 1):
            token = turn - self._sizes[self._period(earlier)]
            if token >= 0 and token // self._readers == earlier:
                found.append(token)
        return found

    def _period(self, batch: int) -> int:
        return batch // self._adapt if self._adapt else 0

    def _judge(self, period: int) -> None:
        """The first reader judges by what it has read, as much as each, and says it to all."""
        now = time.monotonic()
        size = self._climb.next(self._read / max(now - self._began, 1e-9))
        self._began, self._read = now, 0
        self._store.set(f"size/{period}", str(size))

    def _learn_size(self, batch: int) -> None:
        for period in range(max(self._sizes) + 1, self._period(batch) + 1):
            if not self._store.wait(f"size/{period}", self._timeout):
                for earlier in range((period - 1) * self._adapt, period * self._adapt):
                    if self._store.has(f"waits/{earlier * self._readers}"):
                        raise self._overdue(earlier * self._readers)
                raise DeadlineError(
                    f"reader 0 has not said how many may read at a time for {self._timeout:g} s"
                )
            self._sizes[period] = int(self._store.get(f"size/{period}"))


class _Climb:
    """Double or halve as long as more is read, and turn round when less is."""

    def __init__(self, size: int, most: int) -> None:
        self._size, self._most = size, most
        self._up = True
        self._rate = 0.0

    def next(self, rate: float) -> int:
        if rate < self._rate:
            self._up = not self._up
        self._rate = rate
        size = self._size * 2 if self._up else self._size // 2
        self._size = max(1, min(size, self._most))
        return self._size
