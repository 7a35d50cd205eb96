"""How long does a synchronised step take, and how much of it is waiting for gradients?

python benchmarks/sync_step.py --quick
python benchmarks/sync_step.py --full --case workload=nt3 --case ranks=2
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from core import Benchmark, Case, Contender, Extra, Metric, NotRun, Plan, RankGroup, Target, main
from core.model import Round
from core.ranks import Wrap
from netns import LimitedLoopback, Unavailable

MODULE = "contenders.sync"
PLAIN = "loopback"
LINKS = {PLAIN: None, "8gbit": 8.0, "3gbit": 3.0}
# 30 to 100 MB of gradients against 0.1 to 0.3 s of computing on one core: communication matters and
# the whole sweep stays below half an hour.
WORKLOADS: dict[str, dict[str, Any]] = {
    "nt3": {"mb": 32, "filters": 64},
    "resnet50": {"image": 32},
    "transformer": {"layers": 6, "dim": 320, "vocab": 2048, "seq": 32, "batch_size": 4},
}
REFERENCE = "ddp"
OBSERVED = "sapwood+subscriber"
# Two addends sum the same in any order, so every tensor must agree. With more ranks the order
# follows the bucket layout, and a tensor whose true gradient is zero moves by rounding alone.
MAX_WORST_TWO_RANKS = 1e-3
MAX_MOVED = 1e-2


def limited(case: Case) -> bool:
    return LINKS[case["link"]] is not None


def sensible(case: Case) -> bool:
    """One rank has no link; four ranks on the slowest link take longer than they tell."""
    return not limited(case) or case["ranks"] == 2 or (case["ranks"], case["link"]) == (4, "8gbit")


def difference_texts(found: Mapping[str, Any], world: int) -> list[str]:
    texts = []
    for name, gap in found["contenders"].items():
        near = gap["worst"] <= MAX_WORST_TWO_RANKS if world <= 2 else gap["frozen"] == 0
        # Written so that NaN is a difference.
        if not (near and gap["moved"] <= MAX_MOVED):
            texts.append(
                f"weights of {name} differ from {REFERENCE} after {found['steps']} steps: "
                f"max abs {gap['max_abs']:.1e}, relative to the way trained {gap['moved']:.1e} "
                f"(worst tensor {gap['worst']:.1e}), never updated {gap['frozen']}"
            )
    return texts


class SyncSession:
    """One workload, number of ranks and link; all contenders live in the same ranks."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.names, self.options = case, names, options
        self.extra = Extra()
        self.owned = contextlib.ExitStack()
        self.group: RankGroup | None = None
        self.steps = 1
        self.gbit: float | None = None
        self.step_ms: dict[str, list[float]] = collections.defaultdict(list)
        try:
            self.wrap = self.enter_link()
            self.group = self.new_group()
            self.begin(self.group)
        except BaseException:
            self.close()
            raise

    def enter_link(self) -> Wrap:
        rate = LINKS[self.case["link"]]
        if rate is None:
            return lambda command: command
        try:
            link = self.owned.enter_context(LimitedLoopback(rate))
        except Unavailable as reason:
            raise NotRun(str(reason)) from reason
        self.extra.facts["link"] = str(link.measured)
        self.gbit = link.measured.gbit
        return link.command

    def new_group(self) -> RankGroup:
        options = {"workloads": WORKLOADS}
        return RankGroup(
            MODULE, world=self.case["ranks"], case=self.case, options=options, wrap=self.wrap
        )

    def begin(self, group: RankGroup) -> None:
        """Makes the contenders, warms them up and checks that they train the same weights."""
        for name in self.names:
            group.make(name)
        slowest = 0.0
        for name in self.names:
            measured = group.burst(name, warm=self.options["check_steps"] - 2, steps=2)
            slowest = max(slowest, measured["wall"])
        self.steps = max(1, min(self.options["max_burst"], int(self.options["burst"] / slowest)))
        self.extra.facts["steps per sample"] = self.steps
        if self.gbit is not None:
            self.extra.facts["wire floor"] = self.wire_floor(group, self.gbit)
        self.check(group)

    def wire_floor(self, group: RankGroup, gbit: float) -> str:
        """What the link alone takes: no engine's step is shorter than this plus its forward."""
        nbytes = group.ask("call", function="gradient_bytes")[0]
        sent = 2 * (self.case["ranks"] - 1) * nbytes  # a ring, all ranks together
        return f"{sent * 8 / gbit / 1e6:.0f} ms for {sent / 1e6:.0f} MB on the link, and forward"

    def check(self, group: RankGroup) -> None:
        if REFERENCE not in self.names:
            self.extra.facts["weights"] = f"not compared ({REFERENCE} did not run)"
            return
        answers = group.ask("call", function="compare", reference=REFERENCE)
        texts = [text for found in answers for text in difference_texts(found, self.case["ranks"])]
        self.extra.failed_checks += dict.fromkeys(texts)
        gaps = [gap for found in answers for gap in found["contenders"].values()]
        if gaps:
            worst, moved = (max(gap[key] for gap in gaps) for key in ("max_abs", "moved"))
            self.extra.facts[f"weights after {answers[0]['steps']} steps"] = (
                f"max abs difference {worst:.1e}, relative to the way trained {moved:.1e}"
            )

    def measure(self, contender: str) -> dict[str, float]:
        assert self.group is not None
        found = self.group.burst(contender, warm=1, steps=self.steps)
        self.step_ms[contender].append(found["wall"] * 1e3)
        return {
            "step": found["wall"] * 1e3,
            "cpu": found["cpu"] * 1e3,
            "switches": found["switches"],
        }

    def finish(self) -> Extra:
        assert self.group is not None
        if OBSERVED in self.names:
            self.observe_events(self.group)
        self.group.close()
        self.group = None
        if self.case["ranks"] == 2 and not limited(self.case):
            self.measure_memory()
        return self.extra

    def observe_events(self, group: RankGroup) -> None:
        steps = self.options["observed_steps"]
        seen = group.ask("call", function="observe", contender=OBSERVED, steps=steps)
        cost = group.ask("call", function="events_cost", contender=OBSERVED)
        self.add(OBSERVED, "early_share", [share for rank in seen for share in rank["early_share"]])
        step = statistics.median(self.step_ms[OBSERVED])
        for rank in cost:
            self.add(OBSERVED, "events_us", [rank["seconds"] * 1e6])
            self.add(OBSERVED, "events_share", [rank["seconds"] * 1e3 / step])

    def measure_memory(self) -> None:
        for name in self.options["memory_of"] or self.names:
            if name not in self.names:
                continue
            with contextlib.closing(self.new_group()) as fresh:
                peak = fresh.peak_memory(name, steps=self.options["memory_steps"])
            self.add(name, "memory", [peak])

    def add(self, contender: str, metric: str, values: list[float]) -> None:
        self.extra.samples.setdefault(contender, {}).setdefault(metric, []).extend(values)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None
        self.owned.close()


def derive(measured: Round) -> None:
    """Communication exposed: a step minus the step without communication of the same round."""
    floor = measured.get("local")
    if floor is None:
        return
    for name, metrics in measured.items():
        if name != "local":
            metrics["exposed"] = metrics["step"] - floor["step"]


EQUAL = "same model, batches and fused optimizer"
CONTENDERS = (
    Contender(name="sapwood", role="ours", note=f"sapwood.Run, defaults, trace off; {EQUAL}"),
    Contender(name=OBSERVED, role="variant", note="the same with one subscriber that does nothing"),
    Contender(name="ddp", role="peer", note=f"DistributedDataParallel, defaults; {EQUAL}"),
    Contender(name="ddp static", role="peer", note="static_graph=True"),
    Contender(name="ddp view", role="peer", note="gradient_as_bucket_view=True"),
    Contender(
        name="ddp static+view", role="peer", note="static_graph=True, gradient_as_bucket_view=True"
    ),
    Contender(
        name="no overlap", role="baseline", note="one bucket, averaged after backward has ended"
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
        text="at most 2 % slower than the best DDP setting on a plain loopback",
        metric="step",
        at="most",
        bound=1.02,
        where=lambda case: not limited(case),
    ),
    Target(
        text="at least 5 % faster than the best DDP setting on a limited link",
        metric="step",
        at="most",
        bound=0.95,
        where=limited,
    ),
    Target(
        text="more than half of the buckets are updated before the last gradient exists",
        metric="early_share",
        of="ours",
        contender=OBSERVED,
        at="least",
        bound=0.5,
        where=lambda case: case["ranks"] > 1,
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
QUICK = Plan(
    axes={"workload": ["nt3", "transformer"], "ranks": [2], "link": [PLAIN, "8gbit"]},
    seconds_per_case=10,
    min_rounds=3,
    max_rounds=10,
    options={
        "check_steps": 4,
        "burst": 0.3,
        "max_burst": 4,
        "observed_steps": 5,
        "memory_steps": 2,
        "memory_of": ["sapwood", "ddp", "local"],
    },
)
FULL = Plan(
    axes={"workload": list(WORKLOADS), "ranks": [1, 2, 4], "link": list(LINKS)},
    seconds_per_case=45,
    min_rounds=7,
    max_rounds=40,
    options={
        "check_steps": 6,
        "burst": 0.4,
        "max_burst": 8,
        "observed_steps": 20,
        "memory_steps": 5,
        "memory_of": None,
    },
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
