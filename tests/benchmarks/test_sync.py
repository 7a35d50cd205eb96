"""sync_step measures all contenders of a case, on one machine and on several."""

import importlib.util
import subprocess
import sys
from typing import Any

from tests.benchmarks.sessions import BENCHMARKS, measure
from tests.marks import needs_machines

OPTIONS: dict[str, Any] = {
    "check_steps": 3,
    "burst": 0.01,
    "max_burst": 1,
    "observed_steps": 2,
    "memory_steps": 1,
    "memory_of": [],
}


def listed(*arguments: str) -> list[dict[str, str]]:
    command = [sys.executable, str(BENCHMARKS / "sync_step.py"), "--list", *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    lines = [line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("case ")]
    return [dict(part.split("=") for part in line.split(", ")) for line in lines]


def test_the_record_has_both_kinds_of_compute_and_every_size() -> None:
    cases = listed("--full")
    assert {case["compute"] for case in cases} == {"cpu", "emulated"}
    emulated = [case for case in cases if case["compute"] == "emulated"]
    assert {case["ranks"] for case in emulated} == {"2", "4", "8", "16"}
    assert {case["machines"] for case in emulated} == {"1", "2", "4"}
    assert {case["link"] for case in emulated} == {"loopback", "8gbit", "3gbit"}
    for case in cases:
        assert (case["machines"] == "1") == (case["link"] == "loopback")
        assert int(case["ranks"]) % int(case["machines"]) == 0


def test_quick_has_each_kind_of_case_once_and_filters_go_beyond_it() -> None:
    quick = [(case["compute"], case["ranks"], case["machines"]) for case in listed("--quick")]
    assert quick == [(kind, *size) for kind in ("cpu", "emulated") for size in ("21", "42")]
    asked = listed("--case", "compute=emulated", "--case", "ranks=8", "--case", "machines=4")
    assert [(case["ranks"], case["link"]) for case in asked] == [("8", "8gbit")]


def test_contenders_on_one_machine_train_the_same_weights() -> None:
    names = ["sapwood", "sapwood direct", "sapwood+subscriber", "ddp", "no overlap", "local"]
    if importlib.util.find_spec("mpi4py") is not None:
        names.append("mpi4py")
    case = {"compute": "cpu", "workload": "nt3", "ranks": 2, "machines": 1, "link": "loopback"}
    measured, extra = measure("sync_session", "SyncSession", case, names, OPTIONS)
    assert all(measured[name]["step"] > 0 for name in names)
    assert extra["facts"]["sapwood averages"] == "node"
    assert extra["facts"]["gradients"] == "2 ranks x 32.0 MB"
    assert "max abs difference" in extra["facts"]["weights after 3 steps"]
    seen = extra["samples"]["sapwood+subscriber"]
    assert all(0 <= share <= 1 for share in seen["early_share"] + seen["early_bytes"])


@needs_machines
def test_emulated_ranks_on_two_machines() -> None:
    case = {
        "compute": "emulated",
        "workload": "resnet50",
        "ranks": 2,
        "machines": 2,
        "link": "8gbit",
    }
    names = ["sapwood", "ddp", "local"]
    measured, extra = measure("sync_session", "SyncSession", case, names, OPTIONS)
    # Both passes wait for their layers, whatever the machine does beside.
    assert all(measured[name]["step"] > 200 for name in names)
    facts = extra["facts"]
    assert facts["sapwood averages"] == "direct", "one rank per machine has nobody to share with"
    assert facts["link"].endswith("8.0 nominal")
    assert facts["layers take"].startswith("70 ms forward and 137 ms backward")
    assert facts["gradients"].startswith("2 ranks x 48")
