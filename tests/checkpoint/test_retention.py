"""Retention policies, by themselves and together."""

from __future__ import annotations

import pytest

from sapwood.checkpoint.retention import Saved, any_of, best, every, last, spaced, to_drop
from sapwood.errors import ConfigError
from sapwood.tiers.record import CheckpointId


def saved(*steps: int, losses: dict[int, float] | None = None, pace: float = 10.0) -> list[Saved]:
    losses = losses or {}
    return [
        Saved(
            id=CheckpointId(step, "00000a"),
            created=pace * step,
            metrics={"loss": losses[step]} if step in losses else {},
        )
        for step in steps
    ]


def dropped(policy: object, given: list[Saved]) -> list[int]:
    return [id.step for id in to_drop(given, policy)]  # type: ignore[arg-type]


def test_last() -> None:
    assert dropped(last(2), saved(1, 2, 3, 4)) == [1, 2]
    assert dropped(last(9), saved(1, 2)) == []


def test_every() -> None:
    assert dropped(every(10), saved(5, 10, 15, 20, 25)) == [5, 15]


def test_best_ignores_what_has_no_metric() -> None:
    given = saved(1, 2, 3, 4, losses={1: 0.5, 2: 0.1, 3: 0.3})
    assert dropped(best(1, "loss", lower=True), given) == [1, 3]
    assert dropped(best(1, "loss", lower=False), given) == [2, 3]


def test_spaced() -> None:
    assert dropped(spaced(25), saved(1, 2, 3, 4, 5, 6, 7)) == [2, 3, 5, 6]


def test_spaced_with_a_clock_that_was_set_back() -> None:
    before, after = saved(7, 8, 9, pace=1000.0), saved(10, 11, 12, 13, pace=100.0)
    assert dropped(spaced(250), [*before, *after]) == [11, 12]
    unknown = Saved(id=CheckpointId(10, "00000a"), created=0.0)
    assert dropped(spaced(250), [*before, unknown, *saved(11, pace=1000.0)]) == [10]


def test_any_of() -> None:
    assert dropped(any_of(last(1), every(3)), saved(1, 2, 3, 4, 5)) == [1, 2, 4]


def test_the_newest_is_never_dropped() -> None:
    assert dropped(every(100), saved(1, 2, 3)) == [1, 2]


def test_order_of_the_input_does_not_matter() -> None:
    assert dropped(last(1), saved(3, 1, 2)) == [1, 2]


@pytest.mark.parametrize(
    "make", [lambda: last(0), lambda: every(0), lambda: best(0, "x", lower=True), lambda: spaced(0)]
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
