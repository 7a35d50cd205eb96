"""How long until a fresh group of ranks has the saved state again?

python benchmarks/checkpoint_restore.py --quick
python benchmarks/checkpoint_restore.py --full --case workload=nt3 --case ranks=2
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.equality import differences, error_in, not_installed
from contenders.sizes import check_memory, checkpoint_bytes
from core import Benchmark, Case, Contender, Extra, Metric, Plan, RankGroup, Target, main

MODULE = "contenders.restore"
# Both about 600 MB of state to save: weights and momentum, or weights and two moments.
NT3 = {"filters": 16, "batch_size": 2}
RESNET = {"image": 32, "batch_size": 4}
FULL_SIZES = {
    "nt3": {"sgd": {"mb": 300, **NT3}, "adam": {"mb": 200, **NT3}},
    "resnet50": {"sgd": RESNET, "adam": RESNET},
}
QUICK_SIZES = {
    "nt3": {"sgd": {"mb": 16, **NT3}, "adam": {"mb": 16, **NT3}},
    "resnet50": {"sgd": {**RESNET, "width": 0.5}, "adam": {**RESNET, "width": 0.5}},
}
USUAL = {"nt3": "sgd", "resnet50": "adam"}


def sensible(case: Case) -> bool:
    """Every workload with its usual optimizer; with the other one at two ranks."""
    return case["optimizer"] == USUAL[case["workload"]] or case["ranks"] == 2


class RestoreSession:
    """One group of ranks saves with every contender and ends; a fresh one restores in turns."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.extra = Extra()
        name, optimizer = case["workload"], case["optimizer"]
        sizes = options["workloads"][name][optimizer]
        self.model = {"name": name, "optimizer": optimizer, "options": sizes}
        check_memory(checkpoint_bytes(case["ranks"], self.model))
        self.owned = contextlib.ExitStack()
        try:
            self.store = self.owned.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            wanted = [name for name in names if not self.excluded(name, not_installed(name))]
            saved = self.save_all(wanted)
            self.group = self.new_group()
            self.names = self.begin(saved)
        except BaseException:
            self.close()
            raise

    def new_group(self) -> RankGroup:
        options = {"model": self.model, "store": self.store}
        group = RankGroup(MODULE, world=self.case["ranks"], case=self.case, options=options)
        self.owned.callback(group.close)
        return group

    def excluded(self, name: str, reason: str | None) -> bool:
        if reason is None:
            return False
        if name == "sapwood":
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return True

    def create(self, group: RankGroup, names: Sequence[str]) -> list[str]:
        made = []
        for name in names:
            answers = group.ask("call", function="create", contender=name)
            if not self.excluded(name, error_in(answers)):
                made.append(name)
        return made

    def save_all(self, names: Sequence[str]) -> dict[str, list[Any]]:
        group = self.new_group()
        saved = {}
        for name in self.create(group, names):
            answers = group.ask("call", function="save", contender=name)
            if not self.excluded(name, error_in(answers)):
                saved[name] = answers
        if saved:
            size = group.ask("call", function="size")[0]
            self.extra.facts["state to restore"] = f"{size / 1e6:.0f} MB"
        group.close()
        return saved

    def begin(self, saved: Mapping[str, list[Any]]) -> list[str]:
        """A first restore warms caches and is compared with what was saved."""
        left = []
        for name in self.create(self.group, list(saved)):
            answers = self.group.ask("call", function="restore", contender=name, check=True)
            if self.excluded(name, error_in(answers)):
                continue
            left.append(name)
            if name != "memcpy":
                pairs = zip(saved[name], answers, strict=True)
                both = [{"live": was["live"], "loaded": now["loaded"]} for was, now in pairs]
                self.extra.failed_checks += differences(name, both)
        return left

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.group.ask("call", function="restore", contender=contender, check=False)
        error = error_in(answers)
        if error is not None:
            self.names.remove(contender)
            self.excluded(contender, error)
            return {}
        return {
            "restore": max(answer["seconds"] for answer in answers) * 1e3,
            "cpu": answers[0]["cpu"],
        }

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        self.owned.close()


WARM = "files in the page cache"
CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note=f"restore_latest, finds the newest whole checkpoint and verifies checksums; {WARM}",
    ),
    Contender(
        name="torch.load", role="peer", note=f"whole file on every rank, no checksums; {WARM}"
    ),
    Contender(name="torch.load mmap", role="peer", note=f"mmap=True, then copied; {WARM}"),
    Contender(name="safetensors", role="peer", note=f"safe_open, then copied; {WARM}"),
    Contender(name="dcp", role="peer", note=f"load, in place, no checksums; {WARM}"),
    Contender(
        name="torch_checkpointing",
        role="peer",
        note=f"load of the rank's own copy; same number of ranks only; {WARM}",
    ),
    Contender(name="torchsnapshot", role="peer", note=f"restore, no checksums; {WARM}"),
    Contender(name="memcpy", role="limit", note="all bytes of the state from memory to memory"),
)
METRICS = (
    Metric(
        name="restore",
        unit="ms",
        meaning="from the call until the state is in its tensors, slowest rank, warm",
        ratios=True,
    ),
    Metric(name="cpu", unit="s", digits=2, meaning="CPU of all ranks and what they started"),
)
TARGETS = (
    Target(
        text="restore at least as fast as DCP load",
        metric="restore",
        at="most",
        bound=1,
        among=("dcp",),
    ),
)
AXES = {"workload": ["nt3", "resnet50"], "optimizer": ["sgd", "adam"], "ranks": [1, 2, 4]}
QUICK = Plan(
    axes={"workload": ["nt3", "resnet50"], "optimizer": "sgd", "ranks": 2},
    seconds_per_case=5,
    min_rounds=3,
    max_rounds=10,
    options={"workloads": QUICK_SIZES},
)
FULL = Plan(
    axes=AXES,
    seconds_per_case=60,
    min_rounds=5,
    max_rounds=20,
    options={"workloads": FULL_SIZES},
)
BENCHMARK = Benchmark(
    name="checkpoint_restore",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=RestoreSession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
