"""From which step forks leave: each from its own, or all that belong together from the same one."""

from __future__ import annotations

import threading

__all__ = ["LEAD", "Departure"]

LEAD = 2
"""Rank 0 names the step so many steps ahead: by then every donor has heard it."""


class Departure:
    """The step one fork leaves from, or several that are to be compared; rank 0 decides it."""

    def __init__(self, *, count: int = 1, at_step: int | None = None) -> None:
        """``count`` forks leave together; ``at_step``: after this step, and no other."""
        self.step: int | None = None
        """The step, once it is known."""
        self.problem = ""
        """Why there will be none."""
        self._count, self._at = count, at_step
        self._ready: set[str] = set()
        self._armed: set[str] = set()
        self._lock = threading.Lock()
        self.all_ready = threading.Event()
        """The clones of all these forks can receive, or there will be no step."""

    @property
    def settled(self) -> bool:
        """Whether the step is known, or will not be."""
        return self.step is not None or bool(self.problem)

    def far(self, step: int) -> bool:
        """Whether, after ``step`` has ended, it is too early to name a step that was asked for.

        From the moment it is named, clones wait for it, and that has a limit.
        """
        return self._at is not None and step + LEAD < self._at

    def ready(self, session: str) -> None:
        """The clones of a fork can receive."""
        with self._lock:
            self._ready.add(session)
            if len(self._ready) >= self._count:
                self.all_ready.set()

    def armed(self, session: str) -> None:
        """All donors look for the step of a fork."""
        with self._lock:
            self._armed.add(session)

    def settle(self, step: int) -> None:
        """Choose the step if everybody is ready, after ``step`` has ended.

        Called once a step, before any of the forks looks: else a fork that becomes ready meanwhile
        would give the first of them and the last another step.
        """
        with self._lock:
            if self.step is not None or self.problem:
                return
            if self._at is not None and step + LEAD > self._at:
                self.problem = (
                    f"step {self._at} cannot be forked any more: the run has ended step {step}, "
                    "and not all clones are ready; choose a later step"
                )
                self.all_ready.set()
            elif len(self._armed) >= self._count and not self.far(step):
                self.step = step + LEAD

    def give_up(self, why: str) -> None:
        """One of the forks failed: the others do not begin, unless they are on their way."""
        with self._lock:
            if self.step is None and not self.problem:
                self.problem = f"another fork of the same step failed, so none begins: {why}"
                self.all_ready.set()
