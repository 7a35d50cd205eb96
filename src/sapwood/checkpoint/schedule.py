"""Which steps are saved. All ranks must save the same ones, so rank 0 decides and says so in time.

Steps keep the ranks together: a rank that has ended step n + 1 knows that rank 0 has ended step n.
So rank 0 always decides one checkpoint ahead: when it saves one, it writes down when the one after
the next will be, and at the next one every rank knows it without waiting: a thread has read it.
"""

from __future__ import annotations

from contextlib import suppress

from sapwood.errors import SapwoodError
from sapwood.runtime.group import Group
from sapwood.runtime.worker import Worker

__all__ = ["Schedule"]

_POLL = 0.5


class Schedule:
    """The next step to save; it moves on when a step has been saved."""

    def __init__(self, group: Group, every: int | None, key: str, *, stretches: bool) -> None:
        """``stretches``: rank 0 may make intervals longer, so the others ask it."""
        self.every = every
        self.due: int | None = None
        self._group = group
        self._key = key
        self._asks = stretches and group.world > 1
        self._following = 0
        self._before: int | None = None
        self._closed = False
        self._round = 0
        self._read: dict[str, int] = {}
        self._worker: Worker | None = Worker("sapwood-schedule") if self._asks else None

    def start(self, step: int) -> None:
        """Begin after ``step``: the first checkpoint is at the next multiple of ``every``."""
        if self.every is None:
            return
        # After a restore steps come again: what was said of them the first time must not be read.
        self._round += 1
        self.due = self._multiple(step + 1)
        self._following = self.due + self.every
        self._before = None

    def step_ended(self, step: int) -> None:
        """Known ahead: nothing to find out."""

    def saved(self, step: int, *, at_least: int = 1) -> None:
        """``step`` was due and has ended; checkpoints cost so much that ``at_least`` so many steps
        should lie between them. What rank 0 says counts.
        """
        if self.every is None:
            return
        if self._worker is not None and self._group.rank != 0 and self._before is not None:
            self._following = self._told(self._before)
        self.due, self._before = self._following, step
        if self._group.rank == 0 or not self._asks:
            self._following = self._multiple(self.due + max(at_least, 1))
        if self._worker is not None:
            place, following = self._place(step), self._following
            if self._group.rank == 0:
                self._worker.submit(lambda: self._say(place, following))
            else:
                self._worker.submit(lambda: self._read_ahead(place))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        if self._worker is not None:
            self._worker.close(5.0)

    # A group that is gone is heard of elsewhere, by the training itself.

    def _say(self, place: str, following: int) -> None:
        with suppress(SapwoodError, RuntimeError):
            self._group.store.set(place, str(following))

    def _read_ahead(self, place: str) -> None:
        with suppress(SapwoodError, RuntimeError):
            while not self._closed:
                if self._group.store.wait(place, _POLL):
                    self._read[place] = int(self._group.store.get(place))
                    return

    def _told(self, step: int) -> int:
        place = self._place(step)
        known = self._read.pop(place, None)
        return int(self._group.store.get(place)) if known is None else known

    def _place(self, step: int) -> str:
        return f"{self._key}/{self._round}/after-{step}"

    def _multiple(self, step: int) -> int:
        assert self.every is not None
        return -(-step // self.every) * self.every
