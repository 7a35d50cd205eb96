"""What the fork benchmark computes from its answers, and how its two groups find each other."""

import threading
from pathlib import Path

import pytest

from benchmarks.contenders import fork_meeting
from benchmarks.contenders.fork_ablation import ABLATIONS
from benchmarks.contenders.fork_costs import RAW, derive, fork_metrics
from sapwood.clone.manifest import Manifest
from sapwood.clone.plan import ClonePlan
from sapwood.state.catalog import Catalog
from tests.benchmarks.sessions import measure
from tests.marks import needs_machines

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


def clone(ready: float, since: str = "backward", **more: float) -> dict:
    return {"ready": ready, "since": since, "needed": 0.0, **more}


def test_the_slowest_rank_on_either_side_counts() -> None:
    donors = [donor(), donor(begun=10.01, ended=10.25, pair=0.6, steps=[0.2, 0.2, 0.2])]
    clones = [clone(10.3, first=10.5), clone(10.45, first=10.55)]
    found = fork_metrics(donors, clones, 500_000_000)
    assert found == pytest.approx(
        {
            "step": 200,
            "readiness": 200,
            "standby": 400,
            "standby_passes": 4,
            "alive": 9950,
            "first": 300,
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


@pytest.mark.parametrize(("since", "standby"), [("backward", 400), ("end", 250), ("file", 50)])
def test_standby_begins_when_clones_of_an_approach_must_be_there(
    since: str, standby: float
) -> None:
    donors = [donor(), donor(ended=10.25)]
    clones = [clone(10.45, since, needed=10.41), clone(10.3, since, needed=10.4)]
    found = fork_metrics(donors, clones, 1)
    assert found["standby"] == pytest.approx(standby)
    assert found["readiness"] == pytest.approx(200)


def turn_of(step: float, pair: float, step_cpu: float, **more: float) -> dict[str, float]:
    raw = {"pair": pair, "used": 2.0, "trained": 4, "step_cpu": step_cpu, "gigabytes": 0.5}
    raw |= {"own": 1.5, "own_step": 0.25}
    assert set(raw) == set(RAW)
    return {"step": step, **raw, **more}


def test_costs_are_beyond_ordinary_steps_of_the_same_trainer_and_round() -> None:
    measured = {
        "sapwood": turn_of(100, 230, 0.25),
        "sapwood lazy": turn_of(110, 230, 0.25),
        "sapwood p2p": turn_of(120, 520, 0.25, readiness=50),
        "p2p gloo": turn_of(200, 500, 0.5),
        "torchft pg": {},
    }
    derive(measured)
    assert measured["sapwood"] == pytest.approx(
        {"step": 100, "overhead": 10, "overhead_step": 10 / 1.1, "cpu": 2, "cpu_donors": 1}
    )
    assert measured["sapwood p2p"]["overhead"] == pytest.approx(300)
    assert measured["sapwood p2p"]["cost"] == pytest.approx(350)
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


def fork_of(machines: str, names: list[str]) -> tuple[dict, dict]:
    sizes = {"emulated": {"nt3": {"mb": 1, "speed": 20.0, "optimizer": "plain"}}}
    case = {"compute": "emulated", "workload": "nt3", "ranks": 1, "machines": machines}
    options = {"workloads": sizes, "baseline_steps": 1, "first": True}
    measured, extra = measure("fork_session", "ForkSession", case, names, options)
    assert [name for name in extra["facts"] if name.startswith("not run")] == []
    return measured, extra


def test_a_fork_is_measured_from_both_sides() -> None:
    measured, _ = fork_of("one", ["sapwood", "p2p gloo", "loopback"])
    assert {found["sent"] for found in measured.values()} == {measured["loopback"]["sent"]}
    for found in measured.values():
        assert found["alive"] > found["standby"] > 0
        assert found["pair"] > 0
        assert found["trained"] >= 2
    assert measured["sapwood"]["standby"] > measured["sapwood"]["readiness"]
    assert measured["p2p gloo"]["standby"] == pytest.approx(measured["p2p gloo"]["readiness"])
    assert measured["p2p gloo"]["first"] > measured["p2p gloo"]["readiness"]
    assert "first" not in measured["loopback"]


@needs_machines
def test_a_fork_between_machines_and_what_it_leaves_out() -> None:
    names = ["sapwood gated", "sapwood unsharded"]
    measured, extra = fork_of("own", names)
    assert "Gbit/s" in extra["facts"]["links"]
    assert "readiness" not in measured["sapwood gated"]
    for found in measured.values():
        assert found["first"] > 0
        assert found["sent"] == pytest.approx(1, rel=0.1)


def planned(kind: str, donors: int = 2) -> ClonePlan:
    """What a fork of a large and three small tensors would send."""
    entries = [("large", 1 << 20), *((f"small{n}", 1024) for n in range(3))]
    rows = [["model", name, "U8", [size], [0]] for name, size in entries]
    catalog = Catalog.from_json(rows)
    told = Manifest(
        run="r",
        session="s",
        donors=donors,
        clones=donors,
        hosts=("a",) * 2 * donors,
        machines=("a",) * 2 * donors,
        devices=("cpu",) * 2 * donors,
        approach="deepclone",
        transport="gloo",
        relay=kind != "unsharded",
        algorithm="xxh3",
        versions={},
        catalog=tuple(catalog.to_json()),
        buckets=((0, 1, 2, 3),),
        optimizer="torch.optim.SGD",
        groups=((0, 1, 2, 3),),
        schedulers=(),
    )
    with ABLATIONS[kind]():
        return told.plan()


def test_what_is_left_out_of_a_fork_is_left_out_of_its_plan() -> None:
    plan = planned("")
    assert sum(message.nbytes for message in plan.messages) == (1 << 20) + 3 * 1024
    assert sum(message.nbytes for message in planned("unsharded").messages) == 2 * (
        (1 << 20) + 3 * 1024
    )
    assert max(len(message.parts) for message in plan.messages) > 1
    assert max(len(message.parts) for message in planned("unpacked").messages) == 1
    sliced = [part for message in planned("sliced").messages for part in message.parts]
    assert {part.nbytes for part in sliced if part.key[1] == "small0"} == {512}
    assert planned("").digest == plan.digest
