"""One case of sync_step.py: a workload, its ranks, and the machines and links they are on."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from core import Case, Extra, NotRun, RankGroup, Spot

from sapwood.testing.machines import INTERFACE, Machines, Unavailable

MODULE = "contenders.sync"
CPU, EMULATED = "cpu", "emulated"
PLAIN = "loopback"
LINKS = {PLAIN: None, "8gbit": 8.0, "3gbit": 3.0}
# 30 to 100 MB of gradients against 0.1 to 0.3 s of computing on one core: communication matters and
# a case stays below a minute.
WORKLOADS: dict[str, dict[str, Any]] = {
    "nt3": {"mb": 32, "filters": 64},
    "resnet50": {"image": 32},
    "transformer": {"layers": 6, "dim": 320, "vocab": 2048, "seq": 32, "batch_size": 4},
}
# Emulated networks: how many times faster than published. Slower ones, and fewer bytes per rank the
# more ranks there are, because all ranks of all "machines" copy with the same few cores: what is
# emulated is that these are free.
SPEEDS = {"resnet50": 0.5, "vgg16": 0.5, "bert-large": 1.0}
SLOWER = {8: 2, 16: 4}
MEGABYTES = {1: 48, 2: 48, 4: 24, 8: 12, 16: 6}
# Of a limit, which passes bursts; a transfer that gets less is told and goes into the floor.
TOLERANCE = 0.15
REFERENCE = "ddp"
OURS, DIRECT, MPI = "sapwood", "sapwood direct", "mpi4py"
OBSERVED = "sapwood+subscriber"
# Two addends sum the same in any order, so every tensor must agree. With more ranks the order
# follows the bucket layout, and a tensor whose true gradient is zero moves by rounding alone.
MAX_WORST_TWO_RANKS = 1e-3
MAX_MOVED = 1e-2


def workload_of(case: Case) -> dict[str, Any]:
    """The workload of ``sapwood.testing`` and its settings."""
    if case["compute"] == CPU:
        return {"workload": case["workload"], "settings": WORKLOADS[case["workload"]]}
    ranks = case["ranks"]
    settings = {
        "preset": case["workload"],
        "mb": MEGABYTES[ranks],
        "speed": SPEEDS[case["workload"]] / SLOWER.get(ranks, 1),
    }
    return {"workload": "emulated", "settings": settings}


def absent(name: str, case: Case) -> str | None:
    """Why a contender cannot take part, or None; empty if it has no part in such a case."""
    if name in (DIRECT, MPI) and case["ranks"] == 1:
        return ""
    if name == MPI and importlib.util.find_spec("mpi4py") is None:
        return "not installed"
    cores = len(os.sched_getaffinity(0))
    if name == MPI and case["compute"] == CPU and case["ranks"] > cores:
        # Measured: steps of 1 to 5 s where the others take 0.4.
        return f"left out: MPICH spins while it waits, and {cores} cores are fewer than the ranks"
    return None


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
    """All contenders of a case live in the same ranks, so that place and clocks are equal."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.extra = Extra()
        self.names = self.present(names)
        self.owned = contextlib.ExitStack()
        self.group: RankGroup | None = None
        self.steps = 1
        self.gbit: float | None = None
        self.seen: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        try:
            self.spots = self.enter_machines()
            self.group = self.new_group()
            self.begin(self.group)
        except BaseException:
            self.close()
            raise

    def present(self, names: Sequence[str]) -> list[str]:
        reasons = {name: absent(name, self.case) for name in names}
        self.extra.facts |= {name: reason for name, reason in reasons.items() if reason}
        return [name for name, reason in reasons.items() if reason is None]

    def enter_machines(self) -> list[Spot]:
        """Where each rank runs: neighbours on one machine."""
        ranks, count = self.case["ranks"], self.case["machines"]
        if count == 1:
            return [Spot()] * ranks
        rate = LINKS[self.case["link"]]
        try:
            machines = self.owned.enter_context(Machines(count, rate))
            self.gbit = machines.measure()
        except Unavailable as reason:
            raise NotRun(str(reason)) from reason
        if rate is not None and self.gbit > rate * (1 + TOLERANCE):
            raise NotRun(f"the limit does not hold: {self.gbit:.2f} of {rate} Gbit/s")
        self.extra.facts["link"] = f"{self.gbit:.2f} Gbit/s measured, {rate} nominal"
        return [spot(machines, rank * count // ranks) for rank in range(ranks)]

    def new_group(self) -> RankGroup:
        return RankGroup(
            MODULE,
            world=self.case["ranks"],
            case=self.case,
            options=workload_of(self.case),
            spots=self.spots,
            mpi=MPI in self.names,
        )

    def begin(self, group: RankGroup) -> None:
        """Makes the contenders, warms them up and checks that they train the same weights."""
        for name in self.names:
            group.make(name)
        slowest = 0.0
        for name in self.names:
            measured = group.burst(name, warm=self.options["check_steps"] - 2, steps=2)
            slowest = max(slowest, measured["wall"])
        # One step after another's turn would mostly tell how cold the caches were.
        self.steps = max(2, min(self.options["max_burst"], int(self.options["burst"] / slowest)))
        self.say_sizes(group.ask("call", function="gradient_bytes")[0])
        if OURS in self.names:
            chosen = group.ask("call", function="averaging", contender=OURS)[0]
            self.extra.facts |= {f"{OURS} averages": chosen} if chosen else {}
        self.check(group)
        for name in (n for n in (OURS, DIRECT, OBSERVED) if n in self.names):
            learned = group.ask("call", function="settle", contender=name)[0]
            self.extra.facts |= {f"{name} chose": learned} if learned else {}

    def say_sizes(self, nbytes: int) -> None:
        facts, ranks, machines = self.extra.facts, self.case["ranks"], self.case["machines"]
        facts["gradients"] = f"{ranks} ranks x {nbytes / 1e6:.1f} MB"
        facts["steps per sample"] = self.steps
        if self.case["compute"] == EMULATED:
            facts["layers take"] = emulated_text(self.case)
        if self.gbit is not None:
            # Each machine sends its part of the sum, and then its part of the result.
            sent = 2 * (machines - 1) / machines * nbytes
            facts["wire floor"] = (
                f"{sent * 8 / self.gbit / 1e6:.0f} ms for {sent / 1e6:.0f} MB on each machine's "
                "link and direction, with one contribution per machine"
            )

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
        if contender not in self.names:
            return {}
        found = self.group.burst(contender, warm=1, steps=self.steps)
        self.seen[contender].append((found["wall"], found["cpu"]))
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
        self.say_cores()
        if self.options["memory_of"] and self.case["ranks"] == 2 and self.case["machines"] == 1:
            self.measure_memory()
        return self.extra

    def say_cores(self) -> None:
        """How much of the cores computing alone takes: what it leaves is what overlap can use."""
        if not self.seen["local"]:
            return
        cores = len(os.sched_getaffinity(0))
        share = statistics.median(cpu / wall / cores for wall, cpu in self.seen["local"])
        self.extra.facts["cores used by the local step"] = f"{share:.0%} of {cores}"

    def observe_events(self, group: RankGroup) -> None:
        steps = self.options["observed_steps"]
        seen = group.ask("call", function="observe", contender=OBSERVED, steps=steps)
        cost = group.ask("call", function="events_cost", contender=OBSERVED)
        for metric in ("early_share", "early_bytes"):
            self.add(OBSERVED, metric, [share for rank in seen for share in rank[metric]])
        step = statistics.median(wall for wall, _ in self.seen[OBSERVED])
        for rank in cost:
            self.add(OBSERVED, "events_us", [rank["seconds"] * 1e6])
            self.add(OBSERVED, "events_share", [rank["seconds"] / step])

    def measure_memory(self) -> None:
        for name in self.options["memory_of"]:
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


def spot(machines: Machines, number: int) -> Spot:
    return Spot(
        wrap=lambda command: machines.command(number, command),
        address=machines.address(number),
        interface=INTERFACE,
    )


def emulated_text(case: Case) -> str:
    from sapwood.testing.workloads.presets import PRESETS

    preset, speed = PRESETS[case["workload"]], workload_of(case)["settings"]["speed"]
    forward, backward = preset.forward / speed * 1e3, preset.backward / speed * 1e3
    return f"{forward:.0f} ms forward and {backward:.0f} ms backward ({speed:g} x published speed)"
