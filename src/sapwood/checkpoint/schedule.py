"""Which steps are saved. All ranks must save the same ones, so rank 0 decides and says so in time.

Steps keep the ranks together: a rank that has ended step n + 1 knows that rank 0 has ended step n.
So what rank 0 writes down when it ends step n, every rank can read when it ends step n + 1.
"""

from __future__ import annotations

from sapwood.runtime.group import Group

__all__ = ["Schedule"]


class Schedule:
    """The next step to save; it moves on when a step has been saved."""

    def __init__(self, group: Group, every: int | None, key: str, *, stretches: bool) -> None:
        """``stretches``: rank 0 may make the interval longer, so others ask it each time."""
        self.every = every
        self.due: int | None = None
        self._group = group
        self._key = key
        self._asks = stretches and group.world > 1
        self._asking: int | None = None

    def start(self, step: int) -> None:
        """Begin after ``step``: the first checkpoint is at the next multiple of ``every``."""
        self.due = None if self.every is None else (step // self.every + 1) * self.every

    def saved(self, step: int, *, at_least: int = 0) -> None:
        """``step`` has ended and is saved; rank 0 says how long to wait ``at_least``."""
        if self.every is None:
            return
        following = (step // self.every + 1) * self.every
        if not self._asks:
            self.due = max(following, self._multiple(step + at_least))
            return
        if self._group.rank == 0:
            self.due = max(following, self._multiple(step + max(at_least, 2)))
            self._group.store.set(f"{self._key}/after-{step}", str(self.due))
        else:
            self.due, self._asking = None, step

    def ended(self, step: int) -> None:
        """Any step has ended: time to hear what rank 0 decided."""
        if self._asking is not None and step > self._asking:
            key = f"{self._key}/after-{self._asking}"
            self.due, self._asking = int(self._group.store.get(key)), None

    def _multiple(self, step: int) -> int:
        assert self.every is not None
        return -(-step // self.every) * self.every
