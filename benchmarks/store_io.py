"""How long does it take to keep a model, and to have it back, or a part of it?

python benchmarks/store_io.py --quick
python benchmarks/store_io.py --full --case mb=1024 --case durability=memory
"""

from __future__ import annotations

import sys
from typing import Any

from contenders.store_session import StoreSession
from core import Benchmark, Case, Contender, Metric, Plan, Target, main

REAL = {"vgg19": 575, "bert": 3000}
SIZES, LAYERS = [256, 1024, 4096], [10, 100, 500, 1000]


def bytes_of(case: Case) -> int:
    return int(REAL.get(case["model"], case["mb"])) * 10**6


def sensible(case: Case) -> bool:
    """Real shapes once; other sizes than equal ones, and files that are synced, at one size."""
    if case["model"] in REAL:
        return case["mb"] == SIZES[0] and case["layers"] == LAYERS[0]
    if case["model"] == "varied":
        return case["mb"] == SIZES[0] and case["durability"] == "memory"
    if case["durability"] == "memory":
        return case["mb"] < SIZES[2] or case["layers"] in (10, 1000)
    return case["mb"] == SIZES[1] and case["layers"] in (10, 1000)


FILE = "a file in /dev/shm for durability memory, else on the disk"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note="a provider on this machine in memory; else an embedded folder on the disk",
    ),
    Contender(
        name="sapwood on demand",
        role="variant",
        note="a provider whose memory is allocated when it is needed (the paper's ablation)",
    ),
    Contender(name="sapwood tcp", role="variant", note="a provider as on another machine"),
    Contender(name="sapwood folder", role="variant", note=f"embedded, {FILE}"),
    Contender(name="torch.save", role="peer", note=f"load with mmap=True; {FILE}"),
    Contender(name="safetensors", role="peer", note=f"safe_open, mapped, then copied; {FILE}"),
    Contender(name="safetensors read", role="peer", note=f"the same file, read into place; {FILE}"),
    Contender(name="hdf5", role="peer", note=f"h5py, one dataset a tensor; {FILE}"),
    Contender(name="dcp", role="peer", note=f"torch.distributed.checkpoint; {FILE}"),
    Contender(name="fastsafetensors", role="peer", note=f"without GPUDirect; {FILE}"),
    Contender(name="tensorizer", role="peer", note=f"{FILE}"),
    Contender(
        name="mooncake",
        role="peer",
        note="Mooncake Store over TCP, batches, in this process's memory",
    ),
    Contender(
        name="whole model",
        role="peer",
        note="a stand-in for FlameStore: JSON graph, one value for all bytes, nothing sent",
    ),
    Contender(
        name="memcpy", role="limit", note="the same bytes into memory that is mapped already"
    ),
)


def metric(name: str, meaning: str, *, ratios: bool = True) -> Metric:
    return Metric(name=name, unit="ms", meaning=meaning, ratios=ratios)


METRICS = (
    metric("save", "fresh bytes under a new name, until what is promised holds"),
    metric("load", "all tensors into tensors that are there"),
    metric("part15", "the convolutions of VGG19"),
    metric("part35", "BERT without its head"),
    *(metric(f"part{share}", f"{share} % of the layers") for share in (25, 50, 75)),
    metric("attach", "all tensors where they lie, each page touched once"),
    Metric(name="faults", unit="", meaning="minor faults of a save, in the client", digits=0),
    Metric(name="stored", unit="", meaning="bytes kept for each byte of the model", digits=2),
)
WHAT = ("save", "load", "part15", "part35", "part25", "part50", "part75")
TARGETS = (
    *(
        Target(
            text=f"{name} within 1.2x of memcpy (durability memory)",
            metric=name,
            at="most",
            bound=1.2,
            among=("memcpy",),
            where=lambda case: case["durability"] == "memory",
        )
        for name in WHAT
    ),
    Target(
        text="attach and first touch at least 3x faster than safetensors",
        metric="attach",
        at="most",
        bound=1 / 3,
        among=("safetensors",),
        where=lambda case: case["durability"] == "memory",
    ),
    *(
        Target(
            text=f"1000 layers: {name} at least 5x faster than safetensors",
            metric=name,
            at="most",
            bound=0.2,
            among=("safetensors",),
            where=lambda case: case["layers"] == LAYERS[-1] and case["durability"] == "memory",
        )
        for name in ("save", "part25", "part50")
    ),
)
OPTIONS: dict[str, Any] = {"bytes": bytes_of, "copies": 6}
AXES = {
    "model": ["uniform", "varied", "vgg19", "bert"],
    "mb": SIZES,
    "layers": LAYERS,
    "durability": ["memory", "written", "synced"],
}
QUICK = Plan(
    axes={"model": "uniform", "mb": 256, "layers": [10, 1000], "durability": "memory"},
    seconds_per_case=10,
    min_rounds=3,
    max_rounds=5,
    options=OPTIONS,
)
FULL = Plan(axes=AXES, seconds_per_case=90, min_rounds=4, max_rounds=15, options=OPTIONS)
BENCHMARK = Benchmark(
    name="store_io",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=StoreSession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
