"""Checkpoints by the clock: rank 0's decides, and all ranks save the same step.

Clocks and steps of ranks differ, so rank 0 asks when it is time, and the ranks agree on a step a
little ahead: early enough that nobody waits for the agreement, and the step can be captured lazily.
"""

from __future__ import annotations

import math
import time

from sapwood.runtime.agreed import AgreedStep
from sapwood.runtime.group import Group

__all__ = ["TimedSchedule"]

_LONGEST_POLL, _SHORTEST_POLL = 0.5, 0.02
# Others hear of it within a poll or two; a step ends in between, so three are safe.
_POLLS_AHEAD = 3
_WEIGHT = 0.2


class TimedSchedule:
    """The next step to save, known when the step before it has ended."""

    def __init__(self, group: Group, seconds: float, key: str) -> None:
        """Save every ``seconds``; ``start`` begins."""
        self.due: int | None = None
        self._seconds = seconds
        self._leads = group.rank == 0
        self._poll = min(_LONGEST_POLL, max(_SHORTEST_POLL, seconds / 20))
        self._alone = group.world == 1
        self._since = time.monotonic()
        self._ended = self._since
        self._usual = 0.0
        self._steps = 0
        self._at_least = 1
        self._agreed = AgreedStep(
            group,
            key,
            what="agreeing on the step to save",
            when=self._is_time,
            ahead=self._ahead,
            poll=self._poll,
        )

    def start(self, step: int) -> None:
        """Begin after ``step``: the first checkpoint comes when the time has passed once."""
        self._since = self._ended = time.monotonic()
        self._steps = 0
        if self.due is not None:
            # It was agreed on, and steps are now counted from elsewhere: all ranks save the next.
            self.due = step + 1

    def step_ended(self, step: int) -> None:
        """``step`` has ended, and was saved if it was due; find out whether the next one is."""
        now = time.monotonic()
        took, self._ended = now - self._ended, now
        self._usual += (took - self._usual) * (_WEIGHT if self._usual else 1.0)
        self._steps += 1
        if self._agreed.reach() == 0:
            self.due = step + 1

    def saved(self, step: int, *, at_least: int = 1) -> None:
        """``step`` was due and has ended; ``at_least`` so many steps until the next."""
        self.due = None
        self._since, self._steps, self._at_least = time.monotonic(), 0, at_least
        self._agreed.renew()

    def close(self) -> None:
        """End the thread."""
        self._agreed.close()

    def _is_time(self) -> str | None:
        passed = time.monotonic() - self._since >= self._seconds
        return "time" if self._leads and passed and self._steps >= self._at_least - 1 else None

    def _ahead(self) -> int:
        soon = _POLLS_AHEAD * self._poll
        if self._alone or self._usual <= 0 or self._usual >= soon:
            return 0
        return math.ceil(soon / self._usual)
