"""Choosing how to capture, and how often at most, from what checkpoints have cost so far.

As in the paper, what a checkpoint costs is its own step and the next, longer than usual by so much:
that is where copies and background work get in the way.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque

from sapwood.checkpoint.report import SaveReport
from sapwood.checkpoint.settings import CheckpointSettings

__all__ = ["ModeChoice", "Pace", "StepClock"]

log = logging.getLogger(__name__)
_TRIALS = 3
_REMEMBERED = 32


class StepClock:
    """How long steps take: as a rule, and around a checkpoint."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: float | None = None
        self._around: list[float] | None = None

    @property
    def usual(self) -> float | None:
        """The median of ordinary steps, in seconds; None while there was none."""
        return statistics.median(self._usual) if self._usual else None

    def ended(self, now: float, *, saved: bool) -> float | None:
        """A step ended at ``now``; after a checkpoint and the step behind it, what they cost."""
        last, self._last = self._last, now
        if last is None:
            return None
        seconds = now - last
        if saved:
            self._around = [seconds]
            return None
        if self._around is None:
            self._usual.append(seconds)
            return None
        both, self._around = [*self._around, seconds], None
        usual = self.usual
        return None if usual is None else max(0.0, sum(both) - 2 * usual)


class ModeChoice:
    """Tries each way of capturing a few times, then stays with one that is cheap."""

    def __init__(self, modes: tuple[str, ...] = ("lazy", "backward")) -> None:
        """``modes`` in the order they are tried; the first unless another is far better."""
        self._costs: dict[str, list[float]] = {mode: [] for mode in modes}

    @property
    def mode(self) -> str:
        """How to capture next."""
        for mode, costs in self._costs.items():
            if len(costs) < _TRIALS:
                return mode
        first, *others = self._costs
        best = min(others, key=lambda mode: statistics.median(self._costs[mode]), default=first)
        # The first blocks least; what differs by less than costs do among themselves is noise.
        low = statistics.quantiles(self._costs[first])[0]
        return best if statistics.quantiles(self._costs[best])[2] < low else first

    def note(self, mode: str, seconds: float) -> None:
        """A checkpoint taken this way cost so much."""
        costs = self._costs.get(mode)
        if costs is not None:
            costs.append(seconds)
            del costs[:-_REMEMBERED]

    def interval(self, usual: float | None, bound: float) -> int:
        """The number of steps between checkpoints that keeps their cost under ``bound``."""
        costs = self._costs[self.mode]
        if not costs or not usual:
            return 1
        return max(1, math.ceil(statistics.median(costs) / (bound * usual)))


class Pace:
    """How to capture next and when at the earliest, by the settings and by what was measured."""

    def __init__(self, settings: CheckpointSettings, *, speaks: bool = True) -> None:
        """``speaks``: this rank tells the user, for all."""
        self.choice = ModeChoice()
        self._settings = settings
        self._speaks = speaks
        self._clock = StepClock()
        self._waited = 0.0

    @property
    def mode(self) -> str:
        """How to capture next."""
        mode = self._settings.mode
        return self.choice.mode if mode == "auto" else mode

    def step_ended(self, latest: SaveReport | None, *, saved: bool, waited: float) -> None:
        """A step has ended; ``waited`` is what updates have waited for captures so far."""
        cost = self._clock.ended(time.perf_counter(), saved=saved)
        before, self._waited = self._waited, waited
        if cost is not None and latest is not None:
            latest.overhead_seconds = cost
            latest.fence_seconds = waited - before
            self.choice.note(latest.mode, cost)

    def interval(self) -> int:
        """Steps between checkpoints, at least, that hold the bound on overhead."""
        if self._settings.mode != "auto" or not self._settings.stretch:
            return 1
        steps = self.choice.interval(self._clock.usual, self._settings.overhead)
        if steps > self._asked() and self._speaks:
            self._speaks = False
            every = self._settings.every
            log.warning(
                "checkpoints every %s would cost more than %g %% of the time (overhead=), so they "
                "are taken less often, at present %d steps apart or more; stretch=False forbids it",
                every if isinstance(every, str) else f"{every or 1} steps",
                self._settings.overhead * 100,
                steps,
            )
        return steps

    def _asked(self) -> float:
        """Steps between checkpoints as the user wants them."""
        seconds, usual = self._settings.seconds, self._clock.usual
        if seconds is not None:
            return seconds / usual if usual else math.inf
        return self._settings.steps or 1
