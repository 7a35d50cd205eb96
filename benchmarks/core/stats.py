"""Medians with their spread, and ratios of medians with a bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Summary:
    n: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float
    high: float


def summarise(samples: Sequence[float]) -> Summary:
    if not samples:
        return Summary(0, math.nan, math.nan, math.nan)
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=float), [10, 50, 90])
    return Summary(len(samples), float(median), float(p10), float(p90))


def ratio_of_medians(
    above: Sequence[float], below: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> Ratio:
    """median(above) / median(below) and the interval that holds it with probability ``level``.

    Samples of equal number come from the same rounds, so rounds are resampled, not samples: what
    disturbed a whole round then disturbs both medians of a resample alike, as it did in the run.

    A cost is a difference of two times, and noise can make it negative. There is no ratio to such a
    one; where it is above, the ratio is 0: it cannot be told from nothing.
    """
    if not above or not below or np.median(below) <= 0:
        return Ratio(math.nan, math.nan, math.nan)
    top, bottom = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    rng = np.random.default_rng(seed)
    pick = rng.integers(len(top), size=(RESAMPLES, len(top)))
    pick_below = pick
    if len(top) != len(bottom):
        pick_below = rng.integers(len(bottom), size=(RESAMPLES, len(bottom)))
    value = max(0.0, np.median(top)) / np.median(bottom)
    tops = np.maximum(0.0, np.median(top[pick], axis=1))
    bottoms = np.median(bottom[pick_below], axis=1)
    # A resample whose lower median is not positive says that the ratio may be any: infinite.
    spread = np.full(RESAMPLES, math.inf)
    np.divide(tops, bottoms, out=spread, where=bottoms > 0)
    tail = 50 * (1 - level)
    low, high = np.percentile(spread, [tail, 100 - tail], method="nearest")
    return Ratio(float(value), float(low), float(high))
