"""What does a checkpoint cost the training, and how soon is it safe?

python benchmarks/checkpoint_step.py --quick
python benchmarks/checkpoint_step.py --full --case compute=emulated --case ranks=2
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.checkpoint_session import CheckpointSession
from contenders.costs import DDP_BASELINE, EVERY, OURS_BASELINE, derive
from core import Benchmark, Case, Contender, Metric, Plan, Target, main

DCP = ("dcp", "dcp async", "dcp async hardest", "dcp async process")
# Of all ranks together (divided by them), so that copying leaves the cores free however many there
# are; state is twice that with momentum, three times with two moments. What a rank does besides
# takes as long for small tensors: eight ranks at full speed would keep two cores busy by training
# alone. resnet50 on the cores is as it is, in each rank.
NT3 = {"filters": 16, "batch_size": 2}
RESNET = {"image": 32, "batch_size": 4, "optimizer": "adam"}
FULL_SIZES = {
    "cpu": {"nt3": {"mb_all_ranks": 150, **NT3}, "resnet50": RESNET},
    "emulated": {
        "resnet50": {"mb_all_ranks": 64, "full_speed_ranks": 2, "optimizer": "adam"},
        "vgg16": {"mb_all_ranks": 64, "full_speed_ranks": 2},
    },
}
QUICK_SIZES = {
    "cpu": {"nt3": {"mb": 16, **NT3}, "resnet50": {**RESNET, "width": 0.5}},
    "emulated": {
        "resnet50": {"mb_all_ranks": 16, "speed": 4.0, "optimizer": "adam"},
        "vgg16": {"mb_all_ranks": 16, "speed": 4.0},
    },
}
ALWAYS = (
    "torch.save",
    "dcp async hardest",
    "torch_checkpointing",
    "torchsnapshot async",
    "dlrover",
)
"""Peers that run in every case; the others, which these beat, in one of the record."""


def possible(case: Case) -> bool:
    return case["workload"] in FULL_SIZES[case["compute"]]


def recorded(case: Case) -> bool:
    """Every number of ranks with one model of each kind of computing, others with two ranks."""
    swept = {"cpu": "nt3", "emulated": "resnet50"}[case["compute"]]
    return case["workload"] == swept or (case["workload"], case["ranks"]) == ("vgg16", 2)


def open_session(case: Case, names: Sequence[str], options: Mapping[str, Any]) -> CheckpointSession:
    everybody = {"compute": "emulated", "workload": "resnet50", "ranks": 2}

    def wanted(name: str) -> bool:
        weaker = name in PEERS and name not in ALWAYS
        return not weaker or (case == everybody and options["weaker_peers"])

    return CheckpointSession(case, [name for name in names if wanted(name)], options)


SYNCED = "fsync of files and folders by itself"
UNSYNCED = "no fsync of its own: done after the two timed steps, and counted in durable"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note=f"Checkpointer, mode auto, bound on overhead off; {SYNCED}",
    ),
    Contender(name="sapwood lazy", role="variant", note=f"copies beside the next step; {SYNCED}"),
    Contender(
        name="sapwood backward", role="variant", note=f"copies inside back-propagation; {SYNCED}"
    ),
    Contender(
        name="sapwood sharded", role="variant", note=f"copies after the step, blocking; {SYNCED}"
    ),
    Contender(name="sapwood single", role="variant", note=f"the same, rank 0 alone; {SYNCED}"),
    Contender(name="torch.save", role="peer", note=f"rank 0; {UNSYNCED}"),
    Contender(name="safetensors", role="peer", note=f"save_file, rank 0; {UNSYNCED}"),
    Contender(name="dcp", role="peer", note="save, own group; fsync of files, not of folders"),
    Contender(name="dcp async", role="peer", note="async_save, defaults, own group; as dcp"),
    Contender(
        name="dcp async hardest",
        role="peer",
        note="kept stager, async staging, plan caching, buffers copied ahead; waits for staging "
        "before update; as dcp",
    ),
    Contender(
        name="dcp async process",
        role="peer",
        note="the same with shared memory and the process executor; as dcp",
    ),
    Contender(
        name="torch_checkpointing",
        role="peer",
        note="pinned, non-blocking and direct I/O off, buffers copied ahead; lock around update; "
        f"{UNSYNCED}",
    ),
    Contender(name="torchsnapshot", role="peer", note=f"take, replicated; {UNSYNCED}"),
    Contender(name="torchsnapshot async", role="peer", note=f"async_take; {UNSYNCED}"),
    Contender(
        name="dlrover",
        role="peer",
        note=f"DdpCheckpointer, DISK: rank 0 copies to shared memory, a process writes; {UNSYNCED}",
    ),
    Contender(name=DDP_BASELINE, role="baseline", note="the peers' training alone"),
    Contender(name=OURS_BASELINE, role="baseline", note="our training alone"),
    Contender(
        name="memcpy",
        role="limit",
        note="1/ranks of the bytes copied into memory that is mapped already; nothing is written",
    ),
)
PEERS = {contender.name for contender in CONTENDERS if contender.role == "peer"}
METRICS = (
    Metric(
        name="blocking",
        unit="ms",
        digits=2,
        meaning="the training thread is kept: the call, and the wait before the next update",
        ratios=True,
    ),
    Metric(
        name="preparation", unit="ms", digits=2, meaning="copying into staging memory, any thread"
    ),
    Metric(
        name="overhead",
        unit="ms",
        meaning="the step that is saved and the next, minus two steps of the same round's baseline",
    ),
    Metric(name="overhead_step", unit="% of a step", meaning="the same, relative to one step"),
    Metric(
        name="overhead_run",
        unit="% of the run",
        digits=2,
        meaning=f"the same, with a checkpoint every {EVERY} steps",
    ),
    Metric(
        name="cpu",
        unit="s",
        digits=2,
        meaning="CPU of all ranks and of all processes they started, until durable, minus training",
    ),
    Metric(name="durable", unit="s", digits=2, meaning="from the end of the step to fsync done"),
    Metric(name="written", unit="MB", meaning="size of all files of the checkpoint"),
    Metric(name="step", unit="ms", meaning="an ordinary step, slowest rank"),
)


def several(case: Case) -> bool:
    return case["ranks"] > 1


TARGETS = (
    Target(
        text="blocking at least 20x below torch.save, 2 ranks and more",
        metric="blocking",
        at="most",
        bound=1 / 20,
        among=("torch.save",),
        where=several,
    ),
    Target(
        text="blocking at least 5x below the best DCP setting, 2 ranks and more",
        metric="blocking",
        at="most",
        bound=1 / 5,
        among=DCP,
        where=several,
    ),
    Target(
        text="overhead over the two steps at least 3x below the best DCP setting",
        metric="overhead",
        at="most",
        bound=1 / 3,
        among=DCP,
    ),
    Target(
        text="overhead over the two steps under 3 % of a step, emulated, 2 and 8 ranks",
        metric="overhead_step",
        of="ours",
        at="most",
        bound=3,
        where=lambda case: case["compute"] == "emulated" and case["ranks"] in (2, 8),
    ),
    Target(
        text="CPU seconds at least 2x below the best DCP setting",
        metric="cpu",
        at="most",
        bound=1 / 2,
        among=DCP,
    ),
    Target(
        text="blocking within 2x of copying the shard in memory",
        metric="blocking",
        at="most",
        bound=2,
        among=("memcpy",),
    ),
    Target(
        text="preparation within 2x of copying the shard in memory",
        metric="preparation",
        at="most",
        bound=2,
        among=("memcpy",),
    ),
)
WORKLOADS = ["nt3", "resnet50", "vgg16"]
QUICK = Plan(
    axes={"compute": ["emulated", "cpu"], "workload": "resnet50", "ranks": 2},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"workloads": QUICK_SIZES, "baseline_steps": 4, "weaker_peers": False},
)
FULL = Plan(
    axes={"compute": ["emulated", "cpu"], "workload": WORKLOADS, "ranks": [1, 2, 4, 8]},
    seconds_per_case=0,
    min_rounds=8,
    max_rounds=8,
    options={"workloads": FULL_SIZES, "baseline_steps": 6, "weaker_peers": True},
    keep=recorded,
)
BENCHMARK = Benchmark(
    name="checkpoint_step",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=open_session,
    quick=QUICK,
    full=FULL,
    keep=possible,
    derive=derive,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
