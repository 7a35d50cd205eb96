"""What does a checkpoint cost the training, and how soon is it safe?

python benchmarks/checkpoint_step.py --quick
python benchmarks/checkpoint_step.py --full --case workload=nt3 --case ranks=2
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.costs import (
    DDP_BASELINE,
    EVERY,
    OURS_BASELINE,
    baseline_metrics,
    derive,
    save_metrics,
)
from contenders.equality import differences, error_in, not_installed
from core import Benchmark, Case, Contender, Extra, Metric, NotRun, Plan, RankGroup, Target, main
from core.machine import field_of

MODULE = "contenders.checkpoint"
OURS = "sapwood"
DCP = ("dcp", "dcp async", "dcp async hardest", "dcp async process")
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
# Parameters, gradients and buckets, and the optimizer's state, in units of the parameters.
COPIES = {"sgd": 4, "adam": 5}
STATE = {"sgd": 2, "adam": 3}


USUAL = {"nt3": "sgd", "resnet50": "adam"}


def sensible(case: Case) -> bool:
    """Every workload with its usual optimizer; with the other one at two ranks."""
    return case["optimizer"] == USUAL[case["workload"]] or case["ranks"] == 2


def with_variants(case: Case) -> bool:
    """Other ways of our own to capture are compared once per workload: their turns are long."""
    return case["optimizer"] == USUAL[case["workload"]] and case["ranks"] == 2


def needed_bytes(case: Case, sizes: Mapping[str, Any]) -> int:
    """Of all ranks: two trainings, ours and that of the peers, and two staged copies."""
    from sapwood.testing import workloads

    name, optimizer = case["workload"], case["optimizer"]
    parameters = workloads.by_name(name, **sizes[name][optimizer]).parameter_bytes
    per_rank = (2 * COPIES[optimizer] + 2 * STATE[optimizer]) * parameters
    return case["ranks"] * (per_rank + 400 * 2**20)


def check_memory(case: Case, sizes: Mapping[str, Any]) -> None:
    free = field_of("/proc/meminfo", "MemAvailable").split()
    need = needed_bytes(case, sizes)
    if free[0].isdigit() and int(free[0]) * 1024 < need:
        raise NotRun(f"needs {need / 2**30:.1f} GiB, {int(free[0]) / 2**20:.1f} GiB are available")


class CheckpointSession:
    """One workload, optimizer and number of ranks; all contenders live in the same ranks."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.extra = Extra()
        self.chosen: collections.Counter[str] = collections.Counter()
        check_memory(case, options["workloads"])
        self.group = RankGroup(
            MODULE,
            world=case["ranks"],
            case=case,
            options={"workloads": options["workloads"]},
        )
        try:
            self.names = self.begin(names)
        except BaseException:
            self.close()
            raise

    def begin(self, names: Sequence[str]) -> list[str]:
        """Makes the contenders, warms them up and checks that what they saved comes back."""
        if not with_variants(self.case):
            names = [name for name in names if name not in VARIANTS]
        left = [name for name in names if not self.excluded(name, not_installed(name))]
        for name in list(left):
            answers = self.group.ask("call", function="create", contender=name)
            if self.excluded(name, error_in(answers)):
                left.remove(name)
        for name in list(left):
            answers = self.group.ask("call", function="verify", contender=name)
            if self.excluded(name, error_in(answers)):
                left.remove(name)
            else:
                self.extra.failed_checks += differences(name, answers)
        size = self.group.ask("call", function="size")[0]
        self.extra.facts["state to save"] = f"{size / 1e6:.0f} MB"
        return left

    def excluded(self, name: str, reason: str | None) -> bool:
        if reason is None:
            return False
        if name.startswith("sapwood"):
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return True

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.group.ask(
            "call",
            function="turn",
            contender=contender,
            baseline_steps=self.options["baseline_steps"],
        )
        if self.excluded(contender, error_in(answers)):
            self.names.remove(contender)
            return {}
        if contender == OURS:
            self.chosen[answers[0]["mode"]] += 1
        if "steps" in answers[0]:
            return baseline_metrics(answers)
        return save_metrics(answers, durable=contender != "memcpy")

    def finish(self) -> Extra:
        if self.chosen:
            times = ", ".join(f"{mode} {count}" for mode, count in self.chosen.items())
            self.extra.facts["auto captured:"] = times
        return self.extra

    def close(self) -> None:
        self.group.close()


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
    Contender(name=DDP_BASELINE, role="baseline", note="the peers' training alone"),
    Contender(name=OURS_BASELINE, role="baseline", note="our training alone"),
    Contender(
        name="memcpy",
        role="limit",
        note="1/ranks of the bytes copied into memory that is mapped already; nothing is written",
    ),
)
VARIANTS = {contender.name for contender in CONTENDERS if contender.role == "variant"}
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
        text="blocking at least 20x below torch.save, 2 and 4 ranks",
        metric="blocking",
        at="most",
        bound=1 / 20,
        among=("torch.save",),
        where=several,
    ),
    Target(
        text="blocking at least 5x below the best DCP setting, 2 and 4 ranks",
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
        text="overhead over the two steps under 3 % of a step",
        metric="overhead_step",
        of="ours",
        at="most",
        bound=3,
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
QUICK = Plan(
    axes={"workload": ["nt3", "resnet50"], "optimizer": "sgd", "ranks": 2},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"workloads": QUICK_SIZES, "baseline_steps": 3},
)
FULL = Plan(
    axes={"workload": ["nt3", "resnet50"], "optimizer": ["sgd", "adam"], "ranks": [1, 2, 4]},
    seconds_per_case=60,
    min_rounds=3,
    max_rounds=12,
    options={"workloads": FULL_SIZES, "baseline_steps": 3},
)
BENCHMARK = Benchmark(
    name="checkpoint_step",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=CheckpointSession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
    derive=derive,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
