"""What does a whole run with checkpoints take beside plain DDP, and how soon can it stop?

python benchmarks/checkpoint_run.py --quick
python benchmarks/checkpoint_run.py --full --case compute=emulated --case every=5
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.checkpoint_session import DISK, PLACES, CourseSession
from contenders.costs import DDP_BASELINE, OURS_BASELINE, derive_course
from core import Benchmark, Case, Contender, Metric, Plan, Target, main

# Bytes of all ranks together, so that copying them leaves the cores free: 64 MB of parameters,
# twice that of state; see checkpoint_step for the speed. On the cores themselves, a real model of
# about the same size.
FULL_SIZES = {
    "emulated": {"resnet50": {"mb_all_ranks": 64, "full_speed_ranks": 2}},
    "cpu": {"resnet50": {"image": 32, "batch_size": 4, "width": 0.5}},
}
QUICK_SIZES = {
    "emulated": {"resnet50": {"mb_all_ranks": 16, "speed": 4.0}},
    "cpu": {"resnet50": {"image": 32, "batch_size": 4, "width": 0.25}},
}
# All of them timed. Each holds at least one checkpoint with the steps that it can disturb.
STEPS = {"1": 8, "2": 9, "5": 10, "15": 15}
BETWEEN_NODES = {"sapwood partner": (2, 4, 8), "sapwood parity": (4, 8)}
"""Numbers of ranks, and so of nodes, with which a tier between nodes is compared."""


def recorded(case: Case) -> bool:
    """All intervals with two emulated ranks; elsewhere those that say something new."""
    if case["place"] != DISK:
        every = {"200MB/s": 5, "50MB/s": 15}[case["place"]]
        return (case["compute"], case["ranks"], case["every"]) == ("emulated", 2, every)
    if case["compute"] == "cpu":
        return case["ranks"] == 2 and case["every"] in (2, 15)
    return case["ranks"] == 2 or (case["ranks"] in (4, 8) and case["every"] == 5)


def open_session(case: Case, names: Sequence[str], options: Mapping[str, Any]) -> CourseSession:
    def fits(name: str) -> bool:
        ranks = BETWEEN_NODES.get(name)
        once = case["compute"] == "emulated" and case["every"] == 5
        return ranks is None or (once and case["ranks"] in ranks)

    return CourseSession(case, [name for name in names if fits(name)], options)


SYNCED = "fsync of files and folders by itself, each time"
UNSYNCED = "no fsync of its own: left to the kernel, and done for all at the stop"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note=f"Checkpointer, mode auto, bound on overhead off; tiers memory, external; {SYNCED}",
    ),
    Contender(
        name="sapwood partner",
        role="variant",
        note="mode lazy; tiers memory, partner, external; each rank is a node",
    ),
    Contender(
        name="sapwood parity",
        role="variant",
        note="mode lazy; tiers memory, parity (3+1 on 4 nodes, 6+2 on 8), external; each rank is a "
        "node",
    ),
    Contender(name="torch.save", role="peer", note=f"rank 0; {UNSYNCED}"),
    Contender(
        name="dcp async hardest",
        role="peer",
        note="kept stager, async staging, plan caching, buffers copied ahead; waits for staging "
        "before update; fsync of files, not of folders",
    ),
    Contender(name="dcp async process", role="peer", note="the same, by a process of its own"),
    Contender(
        name="torch_checkpointing",
        role="peer",
        note=f"buffers copied ahead; lock around update; {UNSYNCED}",
    ),
    Contender(name="torchsnapshot async", role="peer", note=f"async_take; {UNSYNCED}"),
    Contender(
        name="dlrover",
        role="peer",
        note=f"DdpCheckpointer, DISK: rank 0 copies to shared memory, a process writes; {UNSYNCED}",
    ),
    Contender(name=DDP_BASELINE, role="baseline", note="plain DDP: what all are held against"),
    Contender(name=OURS_BASELINE, role="baseline", note="our training alone"),
)
TIERS = ("memory", "partner", "parity", "external")
METRICS = (
    Metric(
        name="run_ddp",
        unit="% over DDP",
        meaning="all steps, with what checkpoints kept them, beside as many of plain DDP",
    ),
    Metric(
        name="total_ddp",
        unit="% over DDP",
        meaning="the same until the last state is durable: a run of so few steps that stops",
    ),
    Metric(name="run", unit="ms a step", meaning="all steps, slowest rank", ratios=True),
    Metric(
        name="stop",
        unit="s",
        digits=3,
        meaning="save and stop: from the end of the last step until its state, and all that was "
        "under way, is durable in every tier",
        ratios=True,
    ),
    *(
        Metric(
            name=f"stop_{tier}",
            unit="s",
            digits=3,
            meaning=f"from the end of the last step until tier {tier} has its state, slowest rank",
        )
        for tier in TIERS
    ),
    Metric(
        name="taken",
        unit="checkpoints",
        digits=0,
        better="higher",
        meaning="in all steps; fewer than the others have means that some were skipped",
    ),
    Metric(name="written", unit="MB", meaning="all files of the run"),
)
TARGETS = (
    Target(
        text="a run with checkpoints is at most 3 % longer than plain DDP, emulated, every 5 steps",
        metric="run_ddp",
        of="ours",
        at="most",
        bound=3,
        where=lambda case: case["compute"] == "emulated" and case["every"] >= 5,
    ),
    Target(
        text="not longer than with the best peer, in any case",
        metric="run",
        at="most",
        bound=1,
    ),
    Target(
        text="save and stop not later than the best peer",
        metric="stop",
        at="most",
        bound=1,
    ),
)
QUICK = Plan(
    axes={
        "compute": ["emulated", "cpu"],
        "workload": "resnet50",
        "ranks": 2,
        "every": 2,
        "place": DISK,
    },
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"workloads": QUICK_SIZES, "steps": {**STEPS, "2": 5}},
)
FULL = Plan(
    axes={
        "compute": ["emulated", "cpu"],
        "workload": "resnet50",
        "ranks": [2, 4, 8],
        "every": [1, 2, 5, 15],
        "place": list(PLACES),
    },
    seconds_per_case=0,
    min_rounds=8,
    max_rounds=8,
    options={"workloads": FULL_SIZES, "steps": STEPS},
    keep=recorded,
)
BENCHMARK = Benchmark(
    name="checkpoint_run",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=open_session,
    quick=QUICK,
    full=FULL,
    derive=derive_course,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
