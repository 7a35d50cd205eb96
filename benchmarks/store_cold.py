"""How much room do successive checkpoints take as models of a repository, plain and in cold form?

python benchmarks/store_cold.py --quick
python benchmarks/store_cold.py --full --case dtype=bf16

A small transformer is trained with AdamW. Every so many steps its weights are saved, and where the
case says so its moments too, as a version whose parent is the one before.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from core import Benchmark, Case, Contender, Extra, Metric, NotRun, Plan, Target, main
from torch import Tensor

CHAINS = {"plain": 0, "cold": 8, "cold-1": 1}
"""How many versions may differ from each other in a row."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATE = {"fp32": 1e-3, "bf16": 1e-3}
State = dict[str, Tensor]


def trained(case: Case, options: Mapping[str, Any]) -> list[State]:
    """What is to be saved, one version after the other."""
    from sapwood.testing import workloads

    work = workloads.by_name("transformer", layers=options["layers"], dim=options["dim"])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model is slower with more
    model = work.model().to(DTYPES[case["dtype"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE[case["dtype"]])
    found = []
    for step in range(options["warm_up"] + options["versions"] * case["every"]):
        x, y = work.batch(step)
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
        done = step + 1 - options["warm_up"]
        if done > 0 and done % case["every"] == 0:
            found.append(taken(model, optimizer, moments=case["state"] == "all"))
    return found


def taken(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, moments: bool) -> State:
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if moments:
        for number, state in enumerate(optimizer.state.values()):
            found |= {f"{number}/{key}": value.clone() for key, value in state.items()}
    return found


class ColdSession:
    """One training, saved once for each contender."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("zstandard") is None:
            raise NotRun("zstandard is not there")
        import sapwood.store

        self.extra = Extra()
        self.folder = tempfile.TemporaryDirectory(prefix="sapwood-cold-", dir=options.get("place"))
        self.versions = trained(case, options)
        self.repos = {}
        self.fixed: dict[str, dict[str, float]] = {}
        for name in names:
            place = Path(self.folder.name) / name
            self.repos[name] = sapwood.store.open(place)
            self.fixed[name] = self.save(name, place)

    def save(self, name: str, place: Path) -> dict[str, float]:
        repo = self.repos[name]
        for number, state in enumerate(self.versions):
            repo.save(state, f"m@{number}", parent=f"m@{number - 1}" if number else None)
        repo.flush()
        begun, seconds = time.perf_counter(), 0.0
        if CHAINS[name]:
            repo.cool(chain=CHAINS[name])
            seconds = time.perf_counter() - begun
        repo.gc(quiet=0.0)
        kept = sum(path.stat().st_size for path in (place / "packs").rglob("*") if path.is_file())
        whole = sum(t.numel() * t.element_size() for t in self.versions[0].values())
        for number, state in enumerate(self.versions):
            loaded = repo.load(f"m@{number}")
            if not all(torch.equal(loaded[key], state[key]) for key in state):
                self.extra.failed_checks.append(f"{name}: version {number} is another one")
        return {"room": 100 * kept / (whole * len(self.versions)), "cool": seconds, "whole": whole}

    def measure(self, contender: str) -> dict[str, float]:
        fixed, last = self.fixed[contender], len(self.versions) - 1
        into = {key: torch.empty_like(tensor) for key, tensor in self.versions[last].items()}
        begun = time.perf_counter()
        self.repos[contender].load(f"m@{last}", into=into)
        seconds = time.perf_counter() - begun
        name, tensor = max(into.items(), key=lambda item: item[1].numel())
        begun = time.perf_counter()
        self.repos[contender].open(f"m@{last}")[name][: max(1, len(tensor) // 20)]
        rows = time.perf_counter() - begun
        nbytes = fixed["whole"]
        return {
            "room": fixed["room"],
            "load": 1e3 * seconds,
            "load_rate": nbytes / seconds / 1e9,
            "rows": 1e3 * rows,
            "cool_rate": nbytes * last / fixed["cool"] / 1e9 if fixed["cool"] else 0.0,
        }

    def finish(self) -> Extra:
        self.extra.facts["mb"] = next(iter(self.fixed.values()))["whole"] / 1e6
        return self.extra

    def close(self) -> None:
        for repo in self.repos.values():
            repo.close()
        self.folder.cleanup()


CONTENDERS = (
    Contender(name="cold", role="ours", note="exclusive or with the parent, zstd, chains of 8"),
    Contender(name="cold-1", role="variant", note="the same, every other version plain"),
    Contender(name="plain", role="baseline", note="each distinct tensor once"),
)
METRICS = (
    Metric(
        name="room",
        unit="%",
        digits=1,
        meaning="bytes kept, of what all versions have together",
        ratios=True,
    ),
    Metric(name="load", unit="ms", digits=1, meaning="the last version, copied into memory"),
    Metric(name="load_rate", unit="GB/s", better="higher", digits=2, meaning="the same, as bytes"),
    Metric(name="rows", unit="ms", digits=2, meaning="a twentieth of the rows of one tensor"),
    Metric(
        name="cool_rate",
        unit="GB/s",
        better="higher",
        digits=3,
        meaning="rewriting versions and comparing them with their digests",
    ),
)
TARGETS = (Target(text="never more than plain", metric="room", of="ours", at="most", bound=100.5),)
QUICK = Plan(
    axes={"dtype": ["fp32", "bf16"], "state": ["weights", "all"], "every": [1, 20]},
    seconds_per_case=1,
    min_rounds=3,
    max_rounds=5,
    options={"layers": 2, "dim": 192, "versions": 4, "warm_up": 20},
)
FULL = Plan(
    axes={"dtype": ["fp32", "bf16"], "state": ["weights", "all"], "every": [1, 10, 100]},
    seconds_per_case=10,
    min_rounds=5,
    max_rounds=30,
    options={"layers": 8, "dim": 512, "versions": 12, "warm_up": 100},
)
BENCHMARK = Benchmark(
    name="store_cold",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=ColdSession,
    quick=QUICK,
    full=FULL,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
