"""What checkpoints cost, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.checkpoint.auto import ModeChoice, Pace, StepClock
from sapwood.checkpoint.settings import CheckpointSettings


def test_the_cost_is_the_step_and_the_next_beyond_the_usual() -> None:
    clock = StepClock()
    now, costs = 0.0, []
    for number, seconds in enumerate([9.0, 1, 1, 1, 3, 2, 1, 1, 4, 1]):
        now += seconds
        cost = clock.ended(now, saved=number in (4, 8))
        if cost is not None:
            costs.append(cost)
    assert costs == [pytest.approx(3.0), pytest.approx(3.0)]
    assert clock.usual == pytest.approx(1.0)


def test_a_checkpoint_right_behind_another_starts_anew() -> None:
    clock = StepClock()
    for now in (0.0, 1.0, 2.0):
        clock.ended(now, saved=False)
    assert clock.ended(5.0, saved=True) is None
    assert clock.ended(7.0, saved=True) is None
    assert clock.ended(8.0, saved=False) == pytest.approx(1.0)


def test_each_way_is_tried_and_the_cheapest_stays() -> None:
    choice = ModeChoice(("lazy", "backward"))
    costs = {"lazy": 3.0, "backward": 1.0}
    chosen = []
    for _ in range(10):
        chosen.append(choice.mode)
        choice.note(choice.mode, costs[choice.mode])
    assert chosen == ["lazy"] * 3 + ["backward"] * 7
    costs["backward"] = 9.0
    for _ in range(20):
        choice.note(choice.mode, costs[choice.mode])
    assert choice.mode == "lazy"


def test_noise_does_not_move_it_from_the_mode_that_blocks_least() -> None:
    choice = ModeChoice(("lazy", "backward"))
    for mode, costs in {"lazy": (1.0, 1.2, 1.4), "backward": (0.9, 0.7, 1.1)}.items():
        for cost in costs:
            choice.note(mode, cost)
    assert choice.mode == "lazy"


def test_expensive_checkpoints_become_rarer() -> None:
    choice = ModeChoice(("lazy",))
    assert choice.interval(1.0, 0.02) == 1
    choice.note("lazy", 0.5)
    assert choice.interval(1.0, 0.02) == 25
    assert choice.interval(None, 0.02) == 1
    choice.note("unknown", 100.0)
    assert choice.interval(1.0, 0.5) == 1


def expensive(**settings: Any) -> Pace:
    """Checkpoints that cost half a step of one second each."""
    pace = Pace(CheckpointSettings(**settings))
    for now in (0.0, 1.0, 2.0):
        pace._clock.ended(now, saved=False)
    pace.choice.note("lazy", 0.5)
    return pace


@pytest.mark.parametrize("every", [5, "5s"])
def test_rarer_checkpoints_are_said_once_and_can_be_forbidden(every: int | str, caplog) -> None:
    pace = expensive(every=every)
    assert [pace.interval() for _ in range(3)] == [25] * 3
    (record,) = caplog.records
    assert "are taken less often, at present 25 steps apart" in record.getMessage()
    assert "stretch=False forbids it" in record.getMessage()
    caplog.clear()
    insisting = expensive(every=every, stretch=False)
    assert insisting.mode in ("lazy", "backward")  # how is still measured
    assert insisting.interval() == 1
    assert not caplog.records


def test_checkpoints_that_are_cheap_enough_are_not_spoken_of(caplog) -> None:
    assert expensive(every=50).interval() == 25
    assert not caplog.records
