"""How a tensor's elements are distributed, found a block at a time, so that any size is possible.

Two passes: the first finds the range, the second counts. NaN and infinities are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.report.store.elements import Values, is_complex, measured
from sapwood.report.store.plain import number

__all__ = ["Histogram", "histogram"]

_BINS = 64
_Counts = npt.NDArray[np.int64]
Blocks = Callable[[], Iterable[memoryview]]


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """What is known of a tensor's elements."""

    count: int
    nan: int = 0
    positive_infinite: int = 0
    negative_infinite: int = 0
    zero: int = 0
    least: int | float | None = None
    most: int | float | None = None
    """Of finite elements; None where there are none."""
    mean: float = 0.0
    deviation: float = 0.0
    edges: tuple[int | float, ...] = ()
    """One more than there are counts. Of whole numbers each bin holds its lower edge, not its
    upper one."""
    counts: tuple[int, ...] = ()
    whole: bool = False
    """Whether elements are whole numbers or truth values."""
    absolute: bool = False
    """Whether elements are complex, and these are their absolute values."""

    def plain(self) -> dict[str, Any]:
        """As the page gets it: whole numbers as text where JavaScript would round them."""
        return {
            "count": self.count,
            "nan": self.nan,
            "posinf": self.positive_infinite,
            "neginf": self.negative_infinite,
            "zero": self.zero,
            "min": _exact(self.least),
            "max": _exact(self.most),
            "mean": number(self.mean),
            "std": number(self.deviation),
            "edges": [_exact(edge) for edge in self.edges],
            "counts": list(self.counts),
            "whole": self.whole,
            "absolute": self.absolute,
        }


def _exact(value: int | float | None) -> int | float | str | None:
    if value is None:
        return None
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else number(value)


def histogram(blocks: Blocks, dtype: str, bins: int = _BINS) -> Histogram:
    """Count a tensor's elements; ``blocks`` gives its bytes from the beginning, twice."""
    first = _Moments()
    with np.errstate(all="ignore"):  # sums may be infinite, which is said as such
        for block in blocks():
            first.add(measured(block, dtype))
        found = first.found(absolute=is_complex(dtype))
        if found.least is None or found.most is None:
            return found
        spread = _Spread(found.least, found.most, bins, whole=found.whole)
        counts: _Counts = np.zeros(spread.bins, np.int64)
        for block in blocks():
            counts += np.bincount(spread.places(measured(block, dtype)), minlength=spread.bins)
    return _with(found, spread.edges(), counts.tolist())


def _with(found: Histogram, edges: list[int | float], counts: list[int]) -> Histogram:
    values = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Histogram(**{**values, "edges": tuple(edges), "counts": tuple(counts)})


class _Moments:
    """What one pass can tell."""

    def __init__(self) -> None:
        self._count = self._nan = self._above = self._below = self._zero = 0
        self._least: Any = None
        self._most: Any = None
        self._finite, self._mean, self._squares = 0, 0.0, 0.0
        self._whole = False

    def add(self, values: Values) -> None:
        """One block; there is at least one element in it."""
        self._count += len(values)
        self._whole = values.dtype.kind in "biu"
        if not self._whole:
            self._nan += int(np.isnan(values).sum())
            self._above += int(np.isposinf(values).sum())
            self._below += int(np.isneginf(values).sum())
            values = values[np.isfinite(values)]
        if not len(values):
            return
        self._zero += len(values) - int(np.count_nonzero(values))
        least, most = values.min().item(), values.max().item()
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)
        self._join(values.astype(np.float64))

    def _join(self, values: npt.NDArray[np.float64]) -> None:
        """Means and squares of blocks are joined as they are: one sum would lose small numbers."""
        mean = float(values.mean())
        squares = float(((values - mean) ** 2).sum())
        both = self._finite + len(values)
        apart = mean - self._mean
        self._squares += squares + apart * apart * (self._finite / both) * len(values)
        self._mean += apart * (len(values) / both)
        self._finite = both

    def found(self, *, absolute: bool) -> Histogram:
        """All of it."""
        least = int(self._least) if isinstance(self._least, bool) else self._least
        most = int(self._most) if isinstance(self._most, bool) else self._most
        return Histogram(
            count=self._count,
            nan=self._nan,
            positive_infinite=self._above,
            negative_infinite=self._below,
            zero=self._zero,
            least=least,
            most=most,
            mean=self._mean,
            deviation=math.sqrt(self._squares / self._finite) if self._finite else 0.0,
            whole=self._whole,
            absolute=absolute,
        )


class _Spread:
    """Which bin an element belongs to."""

    def __init__(self, least: int | float, most: int | float, bins: int, *, whole: bool) -> None:
        self._least, self._most, self._whole = least, most, whole
        self._width = -(-(int(most) - int(least) + 1) // bins) if whole else 0
        if whole:
            self.bins = -(-(int(most) - int(least) + 1) // self._width)
        else:
            self.bins = bins if most > least else 1

    def edges(self) -> list[int | float]:
        """One more than there are bins."""
        if self._whole:
            return [int(self._least) + n * self._width for n in range(self.bins + 1)]
        if self.bins == 1:
            return [self._least, self._most]
        low, high = self._least, self._most
        inner = [n / self.bins for n in range(1, self.bins)]
        # Weighed, for the distance of the two may be more than a float64 can say.
        return [low, *(low * (1 - part) + high * part for part in inner), high]

    def places(self, values: Values) -> npt.NDArray[np.int64]:
        """The bin of each finite element."""
        if self._whole:
            return self._whole_places(values)
        wide = values[np.isfinite(values)].astype(np.float64)
        if self.bins == 1:
            return np.zeros(len(wide), np.int64)
        length = float(self._most) - float(self._least)
        if math.isfinite(length):
            part = (wide - self._least) / length
        else:
            part = (wide / 2 - self._least / 2) / (self._most / 2 - self._least / 2)
        return np.minimum((part * self.bins).astype(np.int64), self.bins - 1)

    def _whole_places(self, values: Values) -> npt.NDArray[np.int64]:
        # Differences modulo 2**64 are right wherever in 64 bits the numbers are.
        kind = np.uint64 if values.dtype == np.uint64 else np.int64
        base = np.array(int(self._least), kind).view(np.uint64)
        far = values.astype(kind).view(np.uint64) - base
        return (far // np.uint64(self._width)).astype(np.int64)
