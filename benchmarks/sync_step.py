"""How long does a synchronised step take, and how much of it is waiting for gradients?

python benchmarks/sync_step.py --quick
python benchmarks/sync_step.py --full --case compute=cpu --case workload=nt3 --case ranks=2
"""

from __future__ import annotations

import sys
from dataclasses import replace

from contenders.sync_session import (
    CPU,
    DIRECT,
    EMULATED,
    LINKS,
    MPI,
    OBSERVED,
    PLAIN,
    SPEEDS,
    WORKLOADS,
    SyncSession,
)
from core import Benchmark, Case, Contender, Metric, Plan, Target, main
from core.model import Round

DDP = ("ddp", "ddp static", "ddp view", "ddp static+view")


def sensible(case: Case) -> bool:
    """Whether a combination means something: links are between machines, ranks divide evenly."""
    networks = WORKLOADS if case["compute"] == CPU else SPEEDS
    alone = case["machines"] == 1
    return (
        case["workload"] in networks
        and alone == (case["link"] == PLAIN)
        and case["ranks"] % case["machines"] == 0
    )


def worth_it(case: Case) -> bool:
    """What the record holds: every size somewhere, and not every size everywhere."""
    ranks, place = case["ranks"], (case["machines"], case["link"])
    if case["compute"] == CPU:
        # More ranks than this on a few busy cores say something about the cores alone.
        return ranks <= 4 if place == (1, PLAIN) else (ranks, *place) == (4, 2, "8gbit")
    if case["workload"] != "resnet50":
        return (ranks, *place) in ((2, 1, PLAIN), (4, 1, PLAIN), (4, 2, "8gbit"))
    if place == (1, PLAIN):
        return ranks > 1
    return (ranks, place[0]) in ((4, 2), (8, 2), (16, 4)) and (place[1] == "8gbit" or ranks != 8)


def on_one_machine(case: Case, ranks: int) -> bool:
    return case["compute"] == CPU and case["machines"] == 1 and case["ranks"] == ranks


def few_emulated(case: Case) -> bool:
    return case["compute"] == EMULATED and case["ranks"] in (2, 4)


def derive(measured: Round) -> None:
    """Communication exposed: a step minus the step without communication of the same round."""
    floor = measured.get("local")
    if not floor:
        return
    for name, metrics in measured.items():
        if name != "local" and metrics:
            metrics["exposed"] = metrics["step"] - floor["step"]


EQUAL = "same model, batches and fused optimizer"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note=f"sapwood.Run, defaults, trace off, after the 30 steps that measure buckets; {EQUAL}",
    ),
    Contender(name=DIRECT, role="variant", note='averaging="direct": as if all were far apart'),
    Contender(name=OBSERVED, role="variant", note="the same with one subscriber that does nothing"),
    Contender(name="ddp", role="peer", note=f"DistributedDataParallel, defaults; {EQUAL}"),
    Contender(name="ddp static", role="peer", note="static_graph=True"),
    Contender(name="ddp view", role="peer", note="gradient_as_bucket_view=True"),
    Contender(
        name="ddp static+view", role="peer", note="static_graph=True, gradient_as_bucket_view=True"
    ),
    Contender(
        name=MPI,
        role="peer",
        note="one MPICH Allreduce after backward (shared memory inside a machine)",
    ),
    Contender(
        name="no overlap",
        role="baseline",
        note="one bucket, averaged by gloo after backward has ended",
    ),
    Contender(
        name="local",
        role="limit",
        note="no communication: forward, backward and update in each rank, the floor",
    ),
)
METRICS = (
    Metric(name="step", unit="ms", meaning="wall time of a step, slowest rank", ratios=True),
    Metric(name="exposed", unit="ms", meaning="step minus the local step of the same round"),
    Metric(name="cpu", unit="ms", meaning="CPU time of a step, all threads of all ranks"),
    Metric(
        name="memory",
        unit="MiB",
        digits=0,
        meaning="peak resident memory a contender adds, rank that needs most, fresh ranks",
    ),
    Metric(name="switches", unit="1/step", meaning="involuntary context switches, all ranks"),
    Metric(
        name="early_share",
        unit="of buckets",
        digits=2,
        better="higher",
        meaning="updated before the last gradient of the step exists",
    ),
    Metric(
        name="early_bytes",
        unit="of bytes",
        digits=2,
        better="higher",
        meaning="of parameters, updated before the last gradient of the step exists",
    ),
    Metric(
        name="events_us",
        unit="us/step",
        meaning="building and publishing a step's events with no subscriber, an upper bound",
    ),
    Metric(
        name="events_share",
        unit="of a step",
        digits=5,
        meaning="the same, relative to the median step",
    ),
)
TARGETS = (
    Target(
        text="1.25x the best DDP setting: resnet50, transformer, 2 ranks on one machine",
        metric="step",
        at="most",
        bound=1 / 1.25,
        among=DDP,
        where=lambda case: on_one_machine(case, 2) and case["workload"] != "nt3",
    ),
    Target(
        text="1.15x the best DDP setting: nt3, 2 ranks on one machine",
        metric="step",
        at="most",
        bound=1 / 1.15,
        among=DDP,
        where=lambda case: on_one_machine(case, 2) and case["workload"] == "nt3",
    ),
    Target(
        text="CPU time of a step at least 10 % below the best DDP setting's: 2 ranks, one machine",
        metric="cpu",
        at="most",
        bound=0.9,
        among=DDP,
        where=lambda case: on_one_machine(case, 2),
    ),
    Target(
        text="1.2x the best DDP setting: 4 ranks on one machine",
        metric="step",
        at="most",
        bound=1 / 1.2,
        among=DDP,
        where=lambda case: on_one_machine(case, 4),
    ),
    Target(
        text="1.3x the best DDP setting: two machines of two ranks, links of 8 Gbit/s",
        metric="step",
        at="most",
        bound=1 / 1.3,
        among=DDP,
        where=lambda case: (
            (case["compute"], case["ranks"], case["machines"], case["link"]) == (CPU, 4, 2, "8gbit")
        ),
    ),
    Target(
        text="one rank: not slower than the best DDP setting, as far as the interval can tell",
        metric="step",
        at="most",
        bound=1.0,
        among=DDP,
        doubt=True,
        where=lambda case: on_one_machine(case, 1),
    ),
    Target(
        text="averaging=direct on one machine: not slower than the best DDP setting, likewise",
        metric="step",
        contender=DIRECT,
        at="most",
        bound=1.0,
        among=DDP,
        doubt=True,
        where=lambda case: on_one_machine(case, 2) or on_one_machine(case, 4),
    ),
    Target(
        text="emulated, 2 and 4 ranks: 3/4 of the bytes updated before the last gradient exists",
        metric="early_bytes",
        of="ours",
        contender=OBSERVED,
        at="least",
        bound=0.75,
        where=few_emulated,
    ),
    Target(
        text="emulated, 2 and 4 ranks: exposed communication at most half of the best DDP's",
        metric="exposed",
        at="most",
        bound=0.5,
        among=DDP,
        where=few_emulated,
    ),
    Target(
        text="events nobody subscribed to cost less than 1 % of a step",
        metric="events_share",
        of="ours",
        contender=OBSERVED,
        at="most",
        bound=0.01,
    ),
)
FULL = Plan(
    axes={
        "compute": [CPU, EMULATED],
        "workload": list(dict.fromkeys([*WORKLOADS, *SPEEDS])),
        "ranks": [1, 2, 4, 8, 16],
        "machines": [1, 2, 4],
        "link": list(LINKS),
    },
    seconds_per_case=30,
    min_rounds=8,
    max_rounds=40,
    options={
        "check_steps": 6,
        "burst": 0.4,
        "max_burst": 8,
        "observed_steps": 20,
        "memory_steps": 5,
        "memory_of": ["sapwood", DIRECT, *DDP, MPI, "no overlap", "local"],
    },
    keep=worth_it,
)
# Each kind of case once: shared memory and links, busy cores and free ones.
QUICK_CASES = (
    (CPU, "nt3", 2, 1),
    (CPU, "nt3", 4, 2),
    (EMULATED, "resnet50", 2, 1),
    (EMULATED, "resnet50", 4, 2),
)
QUICK = replace(
    FULL,
    axes={
        **FULL.axes,
        "workload": ["nt3", "resnet50"],
        "ranks": [2, 4],
        "machines": [1, 2],
        "link": [PLAIN, "8gbit"],
    },
    seconds_per_case=5,
    min_rounds=2,
    max_rounds=8,
    options={
        "check_steps": 3,
        "burst": 0.2,
        "max_burst": 4,
        "observed_steps": 4,
        "memory_steps": 2,
        "memory_of": [],
    },
    keep=lambda case: (
        (case["compute"], case["workload"], case["ranks"], case["machines"]) in QUICK_CASES
    ),
)
BENCHMARK = Benchmark(
    name="sync_step",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=SyncSession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
    derive=derive,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
