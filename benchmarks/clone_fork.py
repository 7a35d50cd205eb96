"""What does a fork cost the running training, and how soon can its clones train?

python benchmarks/clone_fork.py --quick
python benchmarks/clone_fork.py --full --case compute=emulated --case machines=own
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.fork_costs import derive
from contenders.fork_session import LIMIT, ForkSession
from contenders.sizes import check_memory, fork_bytes, model_of
from contenders.spots import GBIT, ONE, OWN, TWO
from core import Benchmark, Case, Contender, Metric, Plan, Target, main

FILES = ("file torch.save", "file safetensors")
P2P = ("p2p gloo", "p2p mpi4py")
TORCHFT = ("torchft http", "torchft pg")
# The sizes of DeepClone's models, in MB of weights, which is all the state there is: its optimizers
# have no momentum. From four ranks on all of them together have what two would, because they share
# the cores, which also are the network: a byte between two machines takes 2.7 ns of them. Devices
# are slow enough for training and fork to leave some free. On the cores, weights and momentum of
# smaller models.
MOST_MB_PER_SECOND = 200
PAPER = {
    "nt3.a": ("nt3", 60),
    "nt3.b": ("nt3", 110),
    "nt3.c": ("nt3", 170),
    "resnet50": ("resnet50", 91),
    "resnet152": ("resnet152", 223),
    "densenet121": ("densenet121", 27),
}
EMULATED = {
    name: {
        "preset": preset,
        "mb": mb,
        "most_mb_all_ranks": 2 * mb,
        "full_speed_ranks": 4,
        "most_mb_per_second": MOST_MB_PER_SECOND,
        "optimizer": "plain",
    }
    for name, (preset, mb) in PAPER.items()
}
FULL_SIZES = {
    "emulated": EMULATED,
    "cpu": {
        "nt3.a": {"model": "nt3", "mb": 30, "filters": 16, "batch_size": 2},
        "resnet50": {"image": 32, "batch_size": 4},
    },
}
QUICK_SIZES = {
    "emulated": {
        name: {"preset": preset, "mb": 8, "speed": 2.0, "optimizer": "plain"}
        for name, (preset, _) in PAPER.items()
    },
    "cpu": {
        "nt3.a": {"model": "nt3", "mb": 8, "filters": 16, "batch_size": 2},
        "resnet50": {"image": 32, "batch_size": 4, "width": 0.25},
    },
}


STRONGEST = ("file safetensors", "p2p gloo", "torchft pg")
"""The fastest peer of each kind, which runs in every case."""


def possible(case: Case) -> bool:
    return case["workload"] in FULL_SIZES[case["compute"]]


def recorded(case: Case) -> bool:
    """ResNet-50 with every number of ranks, the others with two, each rank on its own machine; on
    one machine, ResNet-50 with both kinds of computing."""
    compute, name, ranks, machines = (
        case[axis] for axis in ("compute", "workload", "ranks", "machines")
    )
    if machines == OWN:
        return compute == "emulated" and (ranks == 2 or name == "resnet50")
    return (name, ranks, machines) == ("resnet50", 2, ONE)


def ablated(case: Case) -> bool:
    """Where our other ways run, and first steps of clones count: many tensors, several ranks."""
    return (case["workload"], case["machines"], case["ranks"]) == ("resnet50", OWN, 4)


def fits(name: str, case: Case) -> bool:
    """All peers with two ranks of ResNet-50 on their own machines; our other ways with four."""
    if name in VARIANTS:
        return ablated(case)
    if name in PEERS and name not in STRONGEST:
        return (case["workload"], case["machines"], case["ranks"]) == ("resnet50", OWN, 2)
    return True


def open_session(case: Case, names: Sequence[str], options: Mapping[str, Any]) -> ForkSession:
    check_memory(fork_bytes(case["ranks"], model_of(case, options["workloads"])))
    fitting = [name for name in names if fits(name, case)]
    return ForkSession(case, fitting, {**options, "first": ablated(case)})


BLOCKING = "training stands still meanwhile"
BESIDE = "beside the next forward and backward; the update waits; rank to rank, whole"
ABLATED = "gloo between machines; otherwise as ours"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note="deepclone, sent inside back-propagation; transport auto: memory on one machine, gloo "
        "and a relay among the clones between machines; checksums verified, all clones agree to "
        "begin; then the first step",
    ),
    Contender(
        name="sapwood gated",
        role="variant",
        note="the first forward pass begins while the last layers arrive, as it does for users; "
        "only what its first step tells is measured",
    ),
    Contender(name="sapwood lazy", role="variant", note="sent beside the next step"),
    Contender(name="sapwood p2p", role="variant", note=f"rank to rank, whole; {BLOCKING}"),
    Contender(
        name="sapwood unsharded",
        role="variant",
        note=f"without shares: each donor sends its clone everything; {ABLATED}",
    ),
    Contender(
        name="sapwood unpacked",
        role="variant",
        note=f"without aggregation: every part of a tensor is a message; {ABLATED}",
    ),
    Contender(
        name="sapwood sliced",
        role="variant",
        note=f"without a threshold: small tensors are cut into shares, too; {ABLATED}",
    ),
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
        note=f"gloo send of 1/ranks of the bytes as one message (links of {GBIT:g} Gbit/s between "
        "machines), receive posted before; nothing "
        f"else runs; {BLOCKING}; the clones have a share each, not the whole",
    ),
)
VARIANTS, PEERS = (
    {contender.name for contender in CONTENDERS if contender.role == role}
    for role in ("variant", "peer")
)
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
        name="cost",
        unit="ms",
        meaning="what a fork costs in all: overhead on the donors plus readiness of the clones",
        ratios=True,
    ),
    Metric(
        name="first",
        unit="ms",
        meaning="from the end of the step that is cloned until the slowest clone has finished its "
        "own first step: readiness, and that step, which it trains beside the donors",
    ),
    Metric(
        name="standby",
        unit="ms",
        meaning="how long clones must be there, by DeepClone's definition: with files, while they "
        "read; sent whole, from the end of that step; ours, from the begin of its "
        "back-propagation; until the slowest could train",
    ),
    Metric(
        name="standby_passes",
        unit="back-propagations",
        digits=2,
        meaning="the same, relative to an ordinary back-propagation with its updates",
    ),
    Metric(
        name="alive",
        unit="ms",
        meaning="alive and idle: from asking the clones to come until the slowest could train, "
        "with all that ours agrees on meanwhile",
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


def apart(case: Case) -> bool:
    """Where the targets are set: the cores are free, and clones have machines of their own."""
    return case["compute"] == "emulated" and case["machines"] == OWN and several(case)


TARGETS = (
    Target(
        text="a fork costs in all at least 5x less than p2p and torchft, emulated, own machines",
        metric="cost",
        at="most",
        bound=1 / 5,
        among=(*P2P, *TORCHFT),
        where=apart,
    ),
    Target(
        text="a fork costs in all at least 10x less than file, emulated, own machines",
        metric="cost",
        at="most",
        bound=1 / 10,
        among=FILES,
        where=apart,
    ),
    Target(
        text="standby at most 1.25 back-propagations, emulated, own machines",
        metric="standby_passes",
        of="ours",
        at="most",
        bound=1.25,
        where=apart,
    ),
    Target(
        text="runtime overhead at least 10x below file and p2p, 2-2 and more",
        metric="overhead",
        at="most",
        bound=1 / 10,
        among=(*FILES, *P2P),
        where=several,
    ),
    Target(
        text="readiness at least 10x below file, 2-2 and more",
        metric="readiness",
        at="most",
        bound=1 / 10,
        among=FILES,
        where=several,
    ),
    Target(
        text="readiness at least 5x below p2p and torchft, 2-2 and more",
        metric="readiness",
        at="most",
        bound=1 / 5,
        among=(*P2P, *TORCHFT),
        where=several,
    ),
    Target(
        text="readiness within 1.5x of a bare send of the shards, 2-2 and more",
        metric="readiness",
        at="most",
        bound=1.5,
        among=(LIMIT,),
        where=several,
    ),
)
QUICK = Plan(
    axes={
        "compute": ["emulated", "cpu"],
        "workload": "resnet50",
        "ranks": 2,
        "machines": [ONE, OWN],
    },
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"workloads": QUICK_SIZES, "baseline_steps": 2},
    keep=recorded,
)
FULL = Plan(
    axes={
        "compute": ["emulated", "cpu"],
        "workload": list(PAPER),
        "ranks": [1, 2, 4, 8],
        "machines": [OWN, TWO, ONE],
    },
    seconds_per_case=0,
    min_rounds=8,
    max_rounds=8,
    options={"workloads": FULL_SIZES, "baseline_steps": 2},
    keep=recorded,
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
    keep=possible,
    derive=derive,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
