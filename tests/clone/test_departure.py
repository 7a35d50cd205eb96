"""Which step a fork begins with: one that was named, one for several, and no other."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sapwood.clone.address import Address
from sapwood.clone.departure import LEAD, Departure
from sapwood.clone.listener import ask
from sapwood.clone.manifest import versions
from sapwood.errors import CloneError
from sapwood.testing import ranks
from tests.clone.forking import (
    MORE,
    donate_in_step,
    donors,
    goes_on_like,
    home_of,
    order,
    receive,
    stop,
)


def fork_all(
    folder: Path, orders: list[dict[str, Any]], last: int
) -> tuple[list[Any], dict[str, Any]]:
    """What becomes of one clone for each order, and of their donor."""
    with ranks.start(donate_in_step, 1, folder, len(orders), last) as group:
        group.wait_mark("open", rank=0, timeout=60)
        home = home_of(folder)
        with ExitStack() as stack:
            started = [
                stack.enter_context(
                    ranks.start(receive, 1, folder / str(n), env=order(home, **options))
                )
                for n, options in enumerate(orders)
            ]
            outcomes = [clones.wait(timeout=60)[0] for clones in started]
        (donor,) = group.wait(timeout=60)
    assert donor.error is None, donor.error
    return outcomes, donor.value


def test_a_step_that_was_named_is_the_step_that_is_forked(tmp_path: Path) -> None:
    (clone,), donor = fork_all(tmp_path, [{"at_step": 12}], last=12 + MORE)
    assert clone.error is None, clone.error
    assert clone.value["step"] == 12
    assert goes_on_like(clone.value, donor)
    assert donor["forks"] == [(12, True, "")]


def test_forks_that_belong_together_begin_with_one_step_and_a_control_goes_on_alike(
    tmp_path: Path,
) -> None:
    together = ("experiment", 3)
    orders: list[dict[str, Any]] = [
        {"overrides": {"optimizer.lr": rate}, "together": together} for rate in (0.5, 0.3)
    ]
    outcomes, donor = fork_all(tmp_path, [{"together": together}, *orders], last=40)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    control, first, second = (outcome.value for outcome in outcomes)
    assert control["step"] == first["step"] == second["step"]
    # The same weights on the same samples; only what follows is another.
    assert control["losses"][0] == first["losses"][0] == second["losses"][0]
    assert len({str(one["rates"]) for one in (control, first, second)}) == 3
    assert goes_on_like(control, donor)


def test_one_that_does_not_come_is_said_to_those_that_wait_for_it(tmp_path: Path) -> None:
    together = ("experiment", 2)
    with donors(tmp_path, 1) as group:
        home = home_of(tmp_path)
        env = order(home, together=together)
        with ranks.start(receive, 1, tmp_path / "clone", env=env) as clones:
            request = {"op": "give up", "together": together, "why": "its script broke"}
            assert ask(Address.read(home), request) == {}
            (outcome,) = clones.wait(timeout=60)
        (seen,) = stop(tmp_path, group)
    assert "another fork of the same step failed" in str(outcome.error)
    assert "its script broke" in str(outcome.error)
    assert [done for _, done, _, _ in seen["forks"]] == [False]


def test_a_step_that_is_over_is_refused_at_once(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        address = Address.read(home_of(tmp_path))
        request = {"versions": versions(), "places": [["here", "cpu", "m"]], "at_step": 1}
        with pytest.raises(CloneError, match=r"step 1 cannot be forked .* choose a later one"):
            ask(address, request)
        for together in ("x", ["x"], ["x", 0], [1, 1], {"x": 1}):
            with pytest.raises(CloneError, match="the run refuses"):
                ask(address, {**request, "at_step": None, "together": together})
        (clone,) = ranks.spawn(receive, 1, tmp_path / "again", env=order(home_of(tmp_path)))
        assert clone["step"] > 1
        (seen,) = stop(tmp_path, group)
    assert len(seen["forks"]) == 1


def test_a_clone_that_begins_late_is_no_failure(tmp_path: Path) -> None:
    patience = 2.0
    with donors(tmp_path, 1, join_timeout=patience) as group:
        env = order(home_of(tmp_path))
        (clone,) = ranks.spawn(receive, 1, tmp_path / "clone", env=env, late=patience + 0.5)
        (seen,) = stop(tmp_path, group)
    assert clone["first"] == seen["states"][clone["step"]]
    assert [(step, done, why) for step, done, why, _ in seen["forks"]] == [
        (clone["step"], True, "")
    ]


def test_a_clone_that_has_all_it_needs_survives_the_end_of_its_donor(tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    with donors(tmp_path, 1) as group:
        env = order(home_of(tmp_path))
        with ranks.start(receive, 1, tmp_path / "clone", env=env, not_before=begin) as clones:
            clones.wait_mark("forked", rank=0, timeout=60)
            time.sleep(0.3)  # the last bytes may still be on their way
            (seen,) = stop(tmp_path, group)
            begin.touch()
            (outcome,) = clones.wait(timeout=60)
    assert outcome.error is None, outcome.error
    assert outcome.value["first"] == seen["states"][outcome.value["step"]]
    assert [(done, why) for _, done, why, _ in seen["forks"]] == [(False, "")]


# -- the decision itself ---------------------------------------------------------------------


def test_all_forks_are_waited_for() -> None:
    departure = Departure(count=2)
    departure.ready("a")
    departure.ready("a")
    departure.armed("a")
    assert not departure.all_ready.is_set()
    departure.settle(5)
    assert departure.step is None
    departure.ready("b")
    assert departure.all_ready.is_set()
    departure.settle(6)
    assert departure.step is None
    departure.armed("b")
    departure.settle(6)
    assert departure.step == 6 + LEAD
    departure.settle(7)
    departure.give_up("too late for that")
    assert (departure.step, departure.problem) == (6 + LEAD, "")


def test_a_named_step_is_kept_or_given_up() -> None:
    departure = Departure(at_step=10)
    departure.ready("a")
    departure.armed("a")
    departure.settle(3)
    # Clones wait for a step that was named only so long, and this one may be hours away.
    assert departure.step is None
    assert departure.far(10 - LEAD - 1)
    departure.settle(10 - LEAD)
    assert departure.step == 10
    assert not departure.far(10 - LEAD)
    late = Departure(at_step=10)
    late.settle(10 - LEAD)
    assert (late.step, late.problem) == (None, "")
    late.settle(10 - LEAD + 1)
    late.ready("a")
    late.settle(10)
    assert late.step is None
    assert "step 10 cannot be forked any more: the run has ended step 9" in late.problem
