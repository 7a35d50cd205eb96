"""What the checkpoint benchmarks compute from their samples, and what they hold to be equal."""

import importlib
import os
import subprocess
import sys
import time

import pytest

from benchmarks.contenders.costs import (
    DDP_BASELINE,
    OURS_BASELINE,
    baseline_metrics,
    course_metrics,
    derive,
    derive_course,
    save_metrics,
)
from benchmarks.contenders.equality import differences, error_in, not_installed
from benchmarks.contenders.files import sync_tree, tree_bytes
from benchmarks.core import processes
from tests.benchmarks.sessions import BENCHMARKS, measure


def answer(live: dict[str, str], loaded: dict[str, str]) -> dict[str, dict[str, str]]:
    return {"live": live, "loaded": loaded}


def test_a_tensor_may_come_back_as_any_rank_had_it() -> None:
    was = [{"w": "1", "mean": "a"}, {"w": "1", "mean": "b"}]
    back = {"w": "1", "mean": "b"}
    assert differences("x", [answer(was[0], back), answer(was[1], back)]) == []


def test_a_tensor_that_no_rank_had_is_a_difference() -> None:
    was = {"w": "1", "mean": "a"}
    found = differences("x", [answer(was, was), answer(was, {**was, "w": "2"})])
    assert found == ["x, rank 1: 1 tensors differ, such as w"]


def test_a_tensor_that_did_not_come_back_is_a_difference() -> None:
    found = differences("x", [answer({"w": "1", "v": "2"}, {"w": "1"})])
    assert found == ["x, rank 0: 1 tensors differ, such as v"]


def test_the_first_line_of_an_error_says_why() -> None:
    assert error_in([{}, {"error": "OSError: no\nat some place"}]) == "OSError: no"
    assert error_in([{}]) is None


def test_a_peer_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["benchmarks.contenders.equality"].NEEDS, "x", "no_such_package")
    assert not_installed("x") == "no_such_package is not installed"
    assert not_installed("torch.save") is None


def saved(blocking: float, pair: float, preparation: float | None = None) -> dict:
    times = {"blocking": blocking, "pair": pair, "preparation": preparation, "durable": 2.0}
    return {**times, "cpu": 3.0, "written": 5_000_000}


def test_the_slowest_rank_counts() -> None:
    found = save_metrics([saved(0.1, 1.0, 0.3), saved(0.2, 0.9, 0.2)], durable=True)
    assert found == pytest.approx(
        {"blocking": 200, "pair": 1000, "preparation": 300, "cpu": 3, "durable": 2, "written": 5}
    )


def test_a_step_without_a_checkpoint_is_timed_in_pairs_as_one_with_it() -> None:
    # Rank 0 is late in the first step and catches up in the second; neither took 0.8 s for two.
    steps = [{"steps": [0.4, 0.1, 0.3, 0.3], "cpu": 0.5}, {"steps": [0.1, 0.4, 0.3, 0.3], "cpu": 0}]
    assert baseline_metrics(steps) == pytest.approx({"step": 275, "step_cpu": 0.5})


def test_more_ranks_on_the_same_cores_get_a_slower_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as the benchmarks' own scripts see them
    model_of = importlib.import_module("contenders.sizes").model_of
    sizes = {"emulated": {"vgg16": {"mb_all_ranks": 64, "full_speed_ranks": 2}}}
    for ranks, mb, speed in ((1, 64, 1.0), (2, 32, 1.0), (8, 8, 0.25)):
        case = {"compute": "emulated", "workload": "vgg16", "ranks": ranks}
        assert model_of(case, sizes)["options"] == {"preset": "vgg16", "mb": mb, "speed": speed}


def test_costs_are_beyond_the_same_trainers_own_steps() -> None:
    measured = {
        "sapwood": {"blocking": 1.0, "pair": 230.0, "cpu": 1.5},
        "dcp": {"blocking": 9.0, "pair": 230.0, "cpu": 1.5},
        OURS_BASELINE: {"step": 100.0, "step_cpu": 0.5},
        DDP_BASELINE: {"step": 110.0, "step_cpu": 0.25},
    }
    derive(measured)
    assert measured["sapwood"] == pytest.approx(
        {"blocking": 1, "overhead": 30, "overhead_step": 30, "overhead_run": 2, "cpu": 0.5}
    )
    assert measured["dcp"]["overhead"] == pytest.approx(10)
    assert measured["dcp"]["cpu"] == pytest.approx(1)


def test_without_a_baseline_there_is_no_overhead() -> None:
    measured = {"dcp": {"blocking": 9.0, "pair": 230.0, "cpu": 1.5}, OURS_BASELINE: {}}
    derive(measured)
    assert measured["dcp"] == {"blocking": 9.0}


def run_of(run: float, stop: float, external: float) -> dict:
    tiers = {"memory": 0.01, "external": external}
    return {"run": run, "stop": stop, "taken": 3, "tiers": tiers, "written": 2_000_000}


def test_a_whole_run_is_held_against_plain_ddp_for_everybody() -> None:
    ours = [run_of(1.0, 0.4, 0.2), run_of(1.1, 0.5, 0.3)]
    measured = {
        "sapwood": course_metrics(ours, steps=10),
        OURS_BASELINE: course_metrics([{"run": 0.9}, {"run": 0.95}], steps=10),
        DDP_BASELINE: course_metrics([{"run": 1.0}, {"run": 0.9}], steps=10),
        "dcp": {},
    }
    derive_course(measured)
    expected = {"run": 110, "total": 160, "stop": 0.5, "taken": 3, "written": 2}
    expected |= {"stop_memory": 0.01, "stop_external": 0.3, "run_ddp": 10, "total_ddp": 60}
    assert measured["sapwood"] == pytest.approx(expected)
    assert measured[OURS_BASELINE]["run_ddp"] == pytest.approx(-5)
    assert measured["dcp"] == {}


SIZES = {"emulated": {"nt3": {"mb_all_ranks": 2, "speed": 20.0}}}


def test_all_contenders_take_as_many_checkpoints_in_a_run() -> None:
    case = {"compute": "emulated", "workload": "nt3", "ranks": 2, "every": 2}
    options = {"workloads": SIZES, "steps": {"2": 6}}
    names = ["sapwood partner", "torch.save", DDP_BASELINE]
    measured, _ = measure("checkpoint_session", "CourseSession", case, names, options)
    ours, peer, plain = measured.values()
    assert (ours["taken"], peer["taken"], plain.get("taken")) == (3, 3, None)
    assert ours["stop_partner"] > 0
    # Weights and momentum, 2 MB; the last step was due. Ours is in files of two tiers.
    assert peer["written"] == pytest.approx(6, rel=0.1)
    assert ours["written"] == pytest.approx(12, rel=0.15)
    for found in (ours, peer):
        assert found["total"] > found["run"] > 0


def test_files_of_a_checkpoint_are_counted_and_synced(tmp_path) -> None:
    (tmp_path / "save" / "inner").mkdir(parents=True)
    (tmp_path / "save" / "a").write_bytes(b"123")
    (tmp_path / "save" / "inner" / "b").write_bytes(b"4567")
    sync_tree(tmp_path / "save")
    assert tree_bytes(tmp_path / "save") == 7
    assert tree_bytes(tmp_path / "none") == 0


def test_cpu_of_a_group_counts_a_process_that_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(processes.GROUP_MARK, mark)
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", burn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.group_cpu_seconds() >= 0.19
        monkeypatch.setenv(processes.GROUP_MARK, mark + "other")
        assert processes.group_cpu_seconds() == 0
    finally:
        child.communicate(b"\n", timeout=20)
