"""How do saves and loads hold up when several clients come at once, to one or more providers?

python benchmarks/store_clients.py --quick
python benchmarks/store_clients.py --full --case clients=8
"""

from __future__ import annotations

import sys
from typing import Any

from contenders.store_session import StoreSession
from core import Benchmark, Case, Contender, Metric, Plan, Target, main


def bytes_of(case: Case) -> int:
    return int(case["mb"]) * 10**6


CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note="providers on this machine in memory; clients share their memory",
    ),
    Contender(name="sapwood tcp", role="variant", note="providers as on other machines"),
    Contender(name="torch.save", role="peer", note="a file a client in /dev/shm, mapped to load"),
    Contender(name="safetensors", role="peer", note="a file a client in /dev/shm, mapped to load"),
    Contender(name="hdf5", role="peer", note="h5py, a file a client in /dev/shm"),
    Contender(
        name="memcpy", role="limit", note="as many processes copy the same bytes at the same time"
    ),
)
METRICS = (
    Metric(
        name="save",
        unit="ms",
        meaning="all clients behind a barrier, each a model of its own; the slowest",
        ratios=True,
    ),
    Metric(name="load", unit="ms", meaning="all tensors into tensors that are there", ratios=True),
    Metric(name="part25", unit="ms", meaning="a quarter of the layers", ratios=True),
    Metric(name="attach", unit="ms", meaning="each page touched once where it lies", ratios=True),
    Metric(name="faults", unit="", meaning="minor faults of a save, median client", digits=0),
)
TARGETS = tuple(
    Target(
        text=f"{name} within 1.3x of as many processes that copy memory",
        metric=name,
        at="most",
        bound=1.3,
        among=("memcpy",),
    )
    for name in ("save", "load", "part25")
)
OPTIONS: dict[str, Any] = {"bytes": bytes_of, "copies": 6}
MODEL = {"model": "uniform", "mb": 256, "layers": 100, "durability": "memory"}
QUICK = Plan(
    axes={**MODEL, "clients": [1, 4], "providers": 1},
    seconds_per_case=10,
    min_rounds=3,
    max_rounds=5,
    options=OPTIONS,
)
FULL = Plan(
    axes={**MODEL, "clients": [1, 2, 4, 8], "providers": [1, 2, 4]},
    seconds_per_case=60,
    min_rounds=5,
    max_rounds=15,
    options=OPTIONS,
)
BENCHMARK = Benchmark(
    name="store_clients",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=StoreSession,
    quick=QUICK,
    full=FULL,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
