"""What the fork benchmark computes from its answers, and how its two groups find each other."""

import threading
from pathlib import Path

import pytest

from benchmarks.contenders import fork_meeting
from benchmarks.contenders.fork_costs import RAW, derive, fork_metrics
from tests.benchmarks.sessions import measure

ROOT = Path(__file__).resolve().parents[2]


def donor(**changes: object) -> dict:
    return {
        "steps": [0.1, 0.3, 0.2],
        "backwards": [0.05, 0.1, 0.1],
        "step_cpu": 0.25,
        "own_cpu": 0.75,
        "own_step_cpu": 0.125,
        "asked": 0.5,
        "begun": 10.0,
        "backward_at": 10.05,
        "ended": 10.2,
        "pair": 0.5,
        "cpu": 2.0,
        "trained": 4,
        "sent": 3_000_000,
        **changes,
    }


def test_the_slowest_rank_on_either_side_counts() -> None:
    donors = [donor(), donor(begun=10.01, ended=10.25, pair=0.6, steps=[0.2, 0.2, 0.2])]
    found = fork_metrics(donors, [{"ready": 10.3}, {"ready": 10.45}], 500_000_000)
    assert found == pytest.approx(
        {
            "step": 200,
            "readiness": 200,
            "standby": 450,
            "standby_passes": 4,
            "join": 9500,
            "sent": 6,
            "pair": 600,
            "used": 2,
            "trained": 4,
            "step_cpu": 0.25,
            "own": 1.5,
            "own_step": 0.25,
            "gigabytes": 1,
        }
    )


def turn_of(step: float, pair: float, step_cpu: float) -> dict[str, float]:
    raw = {"pair": pair, "used": 2.0, "trained": 4, "step_cpu": step_cpu, "gigabytes": 0.5}
    raw |= {"own": 1.5, "own_step": 0.25}
    assert set(raw) == set(RAW)
    return {"step": step, **raw}


def test_costs_are_beyond_ordinary_steps_of_the_same_trainer_and_round() -> None:
    measured = {
        "sapwood": turn_of(100, 230, 0.25),
        "sapwood lazy": turn_of(110, 230, 0.25),
        "sapwood file": turn_of(120, 520, 0.25),
        "p2p gloo": turn_of(200, 500, 0.5),
        "torchft pg": {},
    }
    derive(measured)
    assert measured["sapwood"] == pytest.approx(
        {"step": 100, "overhead": 10, "overhead_step": 10 / 1.1, "cpu": 2, "cpu_donors": 1}
    )
    assert measured["sapwood file"]["overhead"] == pytest.approx(300)
    assert measured["p2p gloo"]["overhead"] == pytest.approx(100)
    assert measured["p2p gloo"]["cpu"] == pytest.approx(0)
    assert measured["torchft pg"] == {}


def both_ends() -> list[fork_meeting.Turn]:
    """Not a fixture: the store listens until nobody knows it any more."""
    store = fork_meeting.host()
    ends = [store, fork_meeting.visit(store.port)]
    return [fork_meeting.Turn(end, 7) for end in ends]


def test_both_sides_hear_each_other() -> None:
    here, there = both_ends()
    here.say("go", "a place")
    assert there.hear("go") == "a place"
    there.count("ready", 2)
    assert not here.heard("ready")
    here.count("ready", 2)
    assert here.hear("ready") is None


def test_who_waits_is_told_that_the_other_side_failed() -> None:
    here, there = both_ends()
    caught: list[Exception] = []

    def wait() -> None:
        try:
            there.hear("never")
        except fork_meeting.OtherSideFailed as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.fail("out of memory")
    waiting.join(20)
    assert str(caught[0]) == "out of memory"


def test_a_fork_is_measured_from_both_sides() -> None:
    names = ["sapwood", "p2p gloo", "loopback"]
    sizes = {"nt3": {"mb": 0.5, "filters": 4, "batch_size": 2}}
    case, options = {"workload": "nt3", "ranks": 1}, {"workloads": sizes, "baseline_steps": 1}
    measured, extra = measure("fork_session", "ForkSession", case, names, options)
    assert [name for name in extra["facts"] if name.startswith("not run")] == []
    assert {found["sent"] for found in measured.values()} == {measured["loopback"]["sent"]}
    for found in measured.values():
        assert found["standby"] > found["readiness"] > 0
        assert found["pair"] > 0
        assert found["trained"] >= 2
