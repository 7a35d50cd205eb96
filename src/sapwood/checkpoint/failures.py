"""Checkpoints that cannot be saved: the training hears of each, and in the end cannot ignore them.

Each is a warning and counted in ``ckpt.stats``; after ``max_failures`` in a row, each is raised in
the run's next step, ``save`` or ``wait``.
"""

from __future__ import annotations

import logging
import threading

from sapwood.checkpoint.report import CheckpointStats, SaveFailure
from sapwood.errors import CheckpointError

__all__ = ["Failures"]

log = logging.getLogger(__name__)


class Failures:
    """Counts what was not saved since the last checkpoint that was; called on any thread."""

    def __init__(self, stats: CheckpointStats, most: int | None) -> None:
        """``most``: so many in a row are raised; None: none ever is."""
        self._stats = stats
        self._most = most
        self._row: list[int] = []  # the steps that failed since the last one that was saved
        self._lock = threading.Lock()
        self._due: CheckpointError | None = None

    def add(self, step: int, error: CheckpointError) -> None:
        """A checkpoint could not be saved."""
        with self._lock:
            self._stats.failures.append(SaveFailure(step=step, reason=str(error)))
            self._row.append(step)
            self._stats.failures_in_a_row = count = len(self._row)
            if self._most is not None and count >= self._most:
                self._due = self._due or _too_many(error, count)
        log.warning("%s (failure %d in a row)", error, count)

    def saved(self, step: int) -> None:
        """A checkpoint is safe somewhere.

        Steps that failed after it still count: a tier is often durable a step or two later, and
        would otherwise take back what the training was about to be told.
        """
        with self._lock:
            self._row = [failed for failed in self._row if failed > step]
            self._stats.failures_in_a_row = len(self._row)
            if self._most is None or len(self._row) < self._most:
                self._due = None

    def go_back(self) -> None:
        """The training was restored: whatever is saved from now on comes after all that failed."""
        with self._lock:
            self._row = [-1] * len(self._row)

    def told(self) -> None:
        """Whoever called has been told of the last one: it need not be raised again."""
        with self._lock:
            self._due = None

    def check(self) -> None:
        """Raise what must not be ignored any longer, once.

        Raises:
            CheckpointError: too many checkpoints in a row were not saved.
        """
        with self._lock:
            due, self._due = self._due, None
        if due is not None:
            raise due


def _too_many(error: CheckpointError, count: int) -> CheckpointError:
    if count == 1:
        return error
    found = CheckpointError(
        f"{error}; {count} checkpoints in a row were not saved, see ckpt.stats.failures "
        "(max_failures= says how many may be)"
    )
    found.__cause__ = error
    return found
