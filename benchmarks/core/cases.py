"""Cases: every combination of the axes a benchmark declares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Axes = Mapping[str, Any]


def values_of(axis: Any) -> Sequence[Any]:
    return axis if isinstance(axis, list | tuple) else [axis]


def expand(axes: Axes, keep: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """All combinations, the first axis varying slowest; a list or tuple is a sweep."""
    combos = itertools.product(*(values_of(axis) for axis in axes.values()))
    cases = [dict(zip(axes, combo, strict=True)) for combo in combos]
    return [case for case in cases if keep(case)]


def label(case: Case) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in case.items())


def parse_filters(texts: Sequence[str], axes: Axes) -> dict[str, set[str]]:
    """``axis=value`` texts; the same axis twice means either value."""
    filters: dict[str, set[str]] = {}
    for text in texts:
        axis, equals, value = text.partition("=")
        if not equals or axis not in axes:
            known = ", ".join(axes)
            raise SystemExit(f"--case {text!r}: expected axis=value with an axis of {known}")
        filters.setdefault(axis, set()).update(value.split(","))
    return filters


def select(cases: Sequence[Case], filters: Mapping[str, set[str]]) -> list[Case]:
    def wanted(case: Case) -> bool:
        return all(str(case[axis]) in allowed for axis, allowed in filters.items())

    return [case for case in cases if wanted(case)]
