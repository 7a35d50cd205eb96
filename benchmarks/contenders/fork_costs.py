"""From what donors and clones answered to what a fork costs and how soon it is ready."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Answers = Sequence[Mapping[str, Any]]
Round = dict[str, dict[str, float]]
OURS = "sapwood"
RAW = ("pair", "used", "trained", "step_cpu", "own", "own_step", "gigabytes")
"""What only ``derive`` needs."""


def slowest(answers: Answers, key: str) -> float:
    """The median step, each as long as its slowest rank."""
    rows = zip(*(answer[key] for answer in answers), strict=True)
    return statistics.median(max(times) for times in rows)


def fork_metrics(donors: Answers, clones: Answers, nbytes: int) -> dict[str, float]:
    """The slowest rank counts; ``pair`` and ``used`` still hold steps of training."""
    ready = max(clone["ready"] for clone in clones)
    ended = max(donor["ended"] for donor in donors)
    begun = min(donor["begun"] for donor in donors)
    backward = slowest(donors, "backwards")
    standby = ready - needed_from(donors, clones)
    found = {
        "step": slowest(donors, "steps") * 1e3,
        "readiness": (ready - ended) * 1e3,
        "standby": standby * 1e3,
        "standby_passes": standby / backward,
        "alive": (ready - donors[0]["asked"]) * 1e3,
        "join": (begun - donors[0]["asked"]) * 1e3,
        "sent": sum(donor["sent"] for donor in donors) / 1e6,
        "pair": max(donor["pair"] for donor in donors) * 1e3,
        "used": donors[0]["cpu"],
        "trained": donors[0]["trained"],
        "step_cpu": donors[0]["step_cpu"],
        "own": sum(donor["own_cpu"] for donor in donors),
        "own_step": sum(donor["own_step_cpu"] for donor in donors),
        "gigabytes": nbytes * len(clones) / 1e9,
    }
    if "first" in clones[0]:
        found["first"] = (max(clone["first"] for clone in clones) - ended) * 1e3
    return found


def needed_from(donors: Answers, clones: Answers) -> float:
    """When the clones must be there, as DeepClone defines it for each approach.

    With a file, when it can be read; sent whole, when the cloned step has ended; sent inside
    back-propagation, when that begins.
    """
    since = clones[0]["since"]
    if since == "file":
        return float(min(clone["needed"] for clone in clones))
    key = {"backward": "backward_at", "end": "ended"}[since]
    return float(min(donor[key] for donor in donors))


def derive(measured: Round) -> None:
    """Costs beyond training, which is what ordinary steps of the same round and trainer take.

    Every turn has such steps. Taken together they are many, and none of them is far away in time;
    ours and DistributedDataParallel are kept apart, or a faster gradient exchange would look like
    a cheaper fork.
    """
    for ours in (True, False):
        alike = [m for name, m in measured.items() if m and name.startswith(OURS) == ours]
        if not alike:
            continue
        step = statistics.median(metrics["step"] for metrics in alike)
        step_cpu = statistics.median(metrics["step_cpu"] for metrics in alike)
        own_step = statistics.median(metrics["own_step"] for metrics in alike)
        for metrics in alike:
            raw = {key: metrics.pop(key) for key in RAW}
            metrics["overhead"] = raw["pair"] - 2 * step
            metrics["overhead_step"] = metrics["overhead"] / step * 100
            if "readiness" in metrics:
                metrics["cost"] = metrics["overhead"] + metrics["readiness"]
            metrics["cpu"] = (raw["used"] - raw["trained"] * step_cpu) / raw["gigabytes"]
            metrics["cpu_donors"] = (raw["own"] - raw["trained"] * own_step) / raw["gigabytes"]
