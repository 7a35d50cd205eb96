"""When to lay buckets out anew.

Every rank feeds this the same facts (they come out of the averaged flags), so every rank comes to
the same decision in the same step without a word between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["Replanner"]


class Replanner:
    """Counts how long the graph has not fitted the plan."""

    def __init__(self, after: int) -> None:
        """``after`` steps of misfit make a new plan due; doubled each time, against thrashing."""
        self._after = after
        self._absent: Counter[int] = Counter()
        self._woken: Counter[int] = Counter()
        self._disorder = 0
        self.reason: str | None = None
        """Why a new plan is due, or None."""

    def note(
        self, absent: Iterable[int], woken: Iterable[int], *, disorder: bool, empty_plan: bool
    ) -> bool:
        """Take in one step; whether it fitted the plan.

        Args:
            absent: planned parameters no rank had a gradient for.
            woken: dormant parameters some rank had a gradient for.
            disorder: on some rank a bucket was complete before an earlier one.
            empty_plan: nothing is planned yet, so anything that woke is reason enough.
        """
        absent, woken = set(absent), set(woken)
        self._absent = Counter({i: self._absent[i] + 1 for i in absent})
        self._woken.update(woken)
        self._disorder = self._disorder + 1 if disorder else 0
        if woken and (empty_plan or max(self._woken.values()) >= self._after):
            self.reason = f"{len(self._woken)} parameters outside the plan have gradients"
        elif absent and max(self._absent.values()) >= self._after:
            self.reason = f"{len(absent)} planned parameters have had no gradient for a while"
        elif self._disorder >= self._after:
            self.reason = "gradients are ready in another order than planned"
        return not (absent or woken or disorder)

    def silent(self) -> set[int]:
        """Parameters absent for long enough to be left out of the next plan."""
        return {i for i, steps in self._absent.items() if steps >= self._after}

    def planned(self) -> None:
        """A new plan was made."""
        if self.reason is not None:
            self._after *= 2
        self._absent.clear()
        self._woken.clear()
        self._disorder = 0
        self.reason = None
