"""Bucket size and overlap with back-propagation, chosen by measurement in a run's first steps.

Where cores are idle during back-propagation, small buckets that are averaged meanwhile cost least;
where it fills every core, whatever runs beside it only takes turns with it and empties its caches.
No constant knows which machine this is. So each candidate trains a few steps of the run, twice, and
rank 0's times decide. Every rank counts the same steps, so all come to the same trial in the same
step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sapwood.runtime.group import Group

__all__ = ["Choice", "Tuner"]

_SIZES = (8.0, 25.0, 100.0)
_WORTHWHILE = 4 * 2**20  # a smaller model is averaged in a millisecond or two, however it is cut
_STEPS = 4  # timed, for each of a candidate's two turns
_GAIN = 0.03  # what a candidate must win over the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How buckets are cut, and when they are averaged and applied."""

    bucket_mb: float
    overlap: bool = True
    """Each as soon as its gradients are complete; else all when back-propagation is over."""

    def __str__(self) -> str:
        """For people."""
        when = "during" if self.overlap else "after"
        return f"buckets of {self.bucket_mb:g} MB, averaged {when} back-propagation"


def _default(device: torch.device, averaging: str) -> float:
    """Gloo's all-reduce of a large bucket would delay every update behind it.

    Through memory a large one is as quick per byte as a small one, and wakes fewer threads.
    """
    return 8.0 if device.type == "cpu" and averaging == "direct" else 25.0


class Tuner:
    """Says what to plan with; the engine makes a new plan whenever ``due`` is not None.

    Fulfils ``Stateful``: what was chosen is kept with the checkpoint, and not measured again.
    """

    may_be_missing = True  # in checkpoints of earlier versions

    def __init__(self, group: Group, averaging: str, bucket_mb: float | None, mode: str) -> None:
        """Nothing is measured if ``bucket_mb`` is given.

        Args:
            group: the ranks.
            averaging: the name of the way of averaging.
            bucket_mb: the size the user asks for.
            mode: when updates are made; what is best for one is not for another.
        """
        self._group = group
        self._averaging = averaging
        self._mode = mode
        self._settled = bucket_mb is not None
        self._trials: list[Choice] = []
        self._at = 0
        self._over = False
        self._seen = 0
        self._times: dict[Choice, list[float]] = {}
        size = bucket_mb or _default(group.device, averaging)
        self.choice = Choice(bucket_mb=size)
        """What to plan with."""
        self.due: str | None = None
        """Why the plan does not fit ``choice`` any longer."""
        self.learned: str | None = None
        """What was measured, for people."""

    def begin(self, nbytes: int, *, late: bool) -> None:
        """Call with the first plan, on all ranks: rank 0 says whether, and what, is tried.

        Args:
            nbytes: the size of all gradients.
            late: whether updates may be late: nobody waits for updated tensors.
        """
        if self._settled or not nbytes:
            return
        self._settled = True
        # Sums of more than two ranks depend on where gloo cuts a bucket.
        worthwhile = nbytes >= _WORTHWHILE and not torch.are_deterministic_algorithms_enabled()
        wanted = [asdict(c) for c in self._candidates(late=late)] if worthwhile else []
        agreed = self._group.share_text("sizes of buckets to try", json.dumps(wanted))
        there = [Choice(**one) for one in json.loads(agreed)]
        if there:
            # There and back: a machine that becomes slower or quicker favours nobody.
            self._trials = [*there, *reversed(there)]
            self._start(0)

    def _candidates(self, *, late: bool) -> list[Choice]:
        """What is worth a trial, the default first.

        Without overlap only where averages come through memory: a network would be idle meanwhile.
        """
        tried = [self.choice]
        for size in _SIZES:
            if size == _SIZES[-1] and late and self._averaging == "node":
                tried.append(Choice(bucket_mb=self.choice.bucket_mb, overlap=False))
            elif size != self.choice.bucket_mb:
                tried.append(Choice(bucket_mb=size))
        return tried

    @property
    def measuring(self) -> bool:
        """Whether trials are under way; the same on all ranks."""
        return bool(self._trials)

    def planned(self) -> None:
        """A plan was made with ``choice``: its first step is not like the others."""
        self.due = None
        self._seen = 0

    def note(self, seconds: float | None) -> None:
        """A step with the present plan took so long; None: this rank had nothing to compute."""
        if not self._trials or self.due is not None:
            return
        self._seen += 1
        if self._seen == 1:
            return
        if seconds is not None:
            self._times.setdefault(self.choice, []).append(seconds)
        if self._seen > _STEPS:
            if self._at + 1 < len(self._trials):
                self._start(self._at + 1)
            else:
                self._over, self.due = True, "trials are over"

    def decide(self) -> None:
        """Call on all ranks before a plan is made: after the last trial, take rank 0's choice."""
        if not self._over:
            return
        medians = {c: statistics.median(times) for c, times in self._times.items()}
        mine = json.dumps([[asdict(c), seconds] for c, seconds in medians.items()])
        agreed = json.loads(self._group.share_text("times of buckets", mine))
        self._take({Choice(**choice): seconds for choice, seconds in agreed})

    def restart(self) -> None:
        """Other parameters are trained now: times of before say nothing."""
        self._times, self._over = {}, False
        if self._trials:
            self._start(0)

    def _start(self, at: int) -> None:
        self._at = at
        if self._trials[at] != self.choice:
            self.due = f"trying {self._trials[at]}"
        self.choice = self._trials[at]
        self._seen = 0

    def _take(self, medians: Mapping[Choice, float]) -> None:
        default = self._trials[0]
        best = min(medians, key=medians.__getitem__, default=default)
        # Without a time of the default (rank 0 had no batch in these steps) nothing is known.
        if default not in medians or medians[best] > medians[default] * (1 - _GAIN):
            best = default
        others = ", ".join(
            f"{1e3 * seconds:.1f} ms with {choice}"
            for choice, seconds in medians.items()
            if choice != best
        )
        time = f"{1e3 * medians[best]:.1f} ms a step" if best in medians else "not timed"
        self.learned = f"{best}: {time}; {others}"
        self.choice, self.due = best, f"measured: {best}"
        self._stop()

    def _stop(self) -> None:
        self._trials, self._times, self._over = [], {}, False

    def state_dict(self) -> dict[str, Any]:
        """The choice, and what it was made for; nothing while trials are under way."""
        if self.learned is None:
            return {}
        return {**asdict(self.choice), "made_for": self._here(), "learned": self.learned}

    def _here(self) -> dict[str, Any]:
        return {"ranks": self._group.world, "averaging": self._averaging, "mode": self._mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a choice that was made for as many ranks, averaging and updating alike."""
        if state.get("made_for") != self._here() or (
            self._settled and not self._trials and self.learned is None
        ):
            return
        chosen = Choice(bucket_mb=state["bucket_mb"], overlap=state["overlap"])
        if chosen != self.choice:
            self.choice, self.due = chosen, f"as in the checkpoint: {chosen}"
        self._settled = True
        self._stop()
        self.learned = state["learned"]
