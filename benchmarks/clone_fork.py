"""What does a fork cost the running training, and how soon can its clones train?

python benchmarks/clone_fork.py --quick
python benchmarks/clone_fork.py --full --case workload=nt3 --case ranks=2
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.fork_costs import derive
from contenders.fork_session import LIMIT, ForkSession
from core import (
    Benchmark,
    Case,
    Contender,
    Metric,
    NotRun,
    Plan,
    Target,
    main,
)
from core.machine import field_of

FILES = ("file torch.save", "file safetensors")
P2P = ("p2p gloo", "p2p mpi4py")
TORCHFT = ("torchft http", "torchft pg")
# Weights and momentum are cloned: nt3 150 MB of state, nt3-large 600 MB, resnet50 205 MB,
# resnet152 482 MB, densenet121 64 MB.
NT3 = {"filters": 16, "batch_size": 2}
IMAGES = {"image": 32, "batch_size": 4}
FULL_SIZES = {
    "nt3": {"mb": 75, **NT3},
    "nt3-large": {"mb": 300, **NT3},
    "resnet50": IMAGES,
    "resnet152": IMAGES,
    "densenet121": IMAGES,
}
QUICK_SIZES = {
    "nt3": {"mb": 8, **NT3},
    "nt3-large": {"mb": 32, **NT3},
    "resnet50": {**IMAGES, "width": 0.25},
    "resnet152": {**IMAGES, "width": 0.25},
    "densenet121": {**IMAGES, "width": 0.25},
}
# In units of the parameters. A donor has two trainings (parameters, gradients, buckets, momentum),
# and a copy of one state while it is checked; a clone has a state, what it has read, and a share.
DONOR_COPIES, CLONE_COPIES = 10, 6
PROCESS = 400 * 2**20


def sensible(case: Case) -> bool:
    """Every number of ranks with a small model of each kind; the others at two."""
    return case["ranks"] == 2 or case["workload"] in ("nt3", "resnet50")


def with_variants(case: Case) -> bool:
    """Our other ways are compared with one model of each kind: their turns are long."""
    return case["ranks"] == 2 and case["workload"] in ("nt3", "resnet50")


def needed_bytes(case: Case, sizes: Mapping[str, Any]) -> int:
    from sapwood.testing import workloads

    name = case["workload"]
    parameters = workloads.by_name(name.partition("-")[0], **sizes[name]).parameter_bytes
    return case["ranks"] * ((DONOR_COPIES + CLONE_COPIES) * parameters + 2 * PROCESS)


def check_memory(case: Case, sizes: Mapping[str, Any]) -> None:
    free = field_of("/proc/meminfo", "MemAvailable").split()
    need = needed_bytes(case, sizes)
    if free[0].isdigit() and int(free[0]) * 1024 < need:
        raise NotRun(f"needs {need / 2**30:.1f} GiB, {int(free[0]) / 2**20:.1f} GiB are available")


def open_session(case: Case, names: Sequence[str], options: Mapping[str, Any]) -> ForkSession:
    check_memory(case, options["workloads"])
    if not with_variants(case):
        names = [name for name in names if name not in VARIANTS]
    return ForkSession(case, names, options)


BLOCKING = "training stands still meanwhile"
BESIDE = "beside the next forward and backward; the update waits; rank to rank, whole"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note="deepclone, sent inside back-propagation; transport auto, which is memory on one "
        "machine; checksums verified, all clones agree to begin",
    ),
    Contender(name="sapwood gloo", role="variant", note="the same, transport gloo"),
    Contender(name="sapwood lazy", role="variant", note="sent beside the next step; memory"),
    Contender(name="sapwood p2p", role="variant", note=f"rank to rank, whole; {BLOCKING}; memory"),
    Contender(name="sapwood file", role="variant", note=f"rank 0 writes, fsync; {BLOCKING}"),
    Contender(
        name="file torch.save",
        role="peer",
        note=f"rank 0, fsync; {BLOCKING}; every clone torch.load, mmap, then copied; warm",
    ),
    Contender(
        name="file safetensors",
        role="peer",
        note=f"save_file by rank 0, fsync; {BLOCKING}; every clone safe_open, then copied; warm",
    ),
    Contender(
        name="p2p gloo",
        role="peer",
        note=f"torch.distributed send of every tensor, all posted at once, whole; {BLOCKING}; "
        "received in place, posted before; no checksums",
    ),
    Contender(
        name="p2p mpi4py",
        role="peer",
        note=f"Isend of every tensor's memory, MPICH, whole; {BLOCKING}; received in place, "
        "posted before; no checksums",
    ),
    Contender(name="torchft http", role="peer", note=f"HTTPTransport; {BESIDE}; then copied"),
    Contender(name="torchft pg", role="peer", note=f"PGTransport, gloo; {BESIDE}; in place"),
    Contender(
        name=LIMIT,
        role="limit",
        note="gloo send of 1/ranks of the bytes as one message, receive posted before; nothing "
        f"else runs; {BLOCKING}; the clones have a share each, not the whole",
    ),
)
VARIANTS = {contender.name for contender in CONTENDERS if contender.role == "variant"}
METRICS = (
    Metric(
        name="overhead",
        unit="ms",
        meaning="the step that is cloned and the next, minus two ordinary ones, slowest donor",
        ratios=True,
    ),
    Metric(name="overhead_step", unit="% of a step", meaning="the same, relative to one step"),
    Metric(
        name="readiness",
        unit="ms",
        meaning="from the end of the step that is cloned until the slowest clone could train",
        ratios=True,
    ),
    Metric(
        name="standby",
        unit="ms",
        meaning="from the begin of that step until the slowest clone could train",
    ),
    Metric(
        name="standby_passes",
        unit="back-propagations",
        digits=2,
        meaning="from the begin of that step's back-propagation, relative to an ordinary one",
    ),
    Metric(
        name="cpu",
        unit="s/GB",
        digits=2,
        meaning="CPU of all processes of both groups from the begin of that step until all is "
        "over, minus training, for each GB a clone holds then",
    ),
    Metric(
        name="cpu_donors",
        unit="s/GB",
        digits=2,
        meaning="the same, of the donors' processes alone: what the training would feel if the "
        "clones had machines of their own",
    ),
    Metric(name="sent", unit="MB", meaning="what leaves the donors, all together"),
    Metric(
        name="join",
        unit="ms",
        meaning="from the clones' request to the begin of that step, while the donors train; "
        "peers are connected beforehand",
    ),
    Metric(name="step", unit="ms", meaning="an ordinary step, slowest donor"),
)


def several(case: Case) -> bool:
    return case["ranks"] > 1


TARGETS = (
    Target(
        text="runtime overhead at least 10x below file and p2p, 2-2 and 4-4",
        metric="overhead",
        at="most",
        bound=1 / 10,
        among=(*FILES, *P2P),
        where=several,
    ),
    Target(
        text="readiness at least 10x below file, 2-2 and 4-4",
        metric="readiness",
        at="most",
        bound=1 / 10,
        among=FILES,
        where=several,
    ),
    Target(
        text="readiness at least 5x below p2p and torchft, 2-2 and 4-4",
        metric="readiness",
        at="most",
        bound=1 / 5,
        among=(*P2P, *TORCHFT),
        where=several,
    ),
    Target(
        text="standby about one back-propagation (at most 1.25), 2-2 and 4-4",
        metric="standby_passes",
        of="ours",
        at="most",
        bound=1.25,
        where=several,
    ),
    Target(
        text="readiness within 1.5x of a bare send of the shards, 2-2 and 4-4",
        metric="readiness",
        at="most",
        bound=1.5,
        among=(LIMIT,),
        where=several,
    ),
)
QUICK = Plan(
    axes={"workload": ["nt3", "resnet50"], "ranks": 2},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"workloads": QUICK_SIZES, "baseline_steps": 2},
)
FULL = Plan(
    axes={"workload": list(FULL_SIZES), "ranks": [1, 2, 4]},
    seconds_per_case=30,
    min_rounds=3,
    max_rounds=8,
    options={"workloads": FULL_SIZES, "baseline_steps": 2},
)
BENCHMARK = Benchmark(
    name="clone_fork",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=open_session,
    quick=QUICK,
    full=FULL,
    keep=sensible,
    derive=derive,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
