"""From what the ranks answered to what a checkpoint costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Answers = Sequence[Mapping[str, Any]]
Round = dict[str, dict[str, float]]
EVERY = 15
"""Steps from checkpoint to checkpoint, for the cost relative to a whole run."""
OURS_BASELINE, DDP_BASELINE = "no checkpoint, sapwood", "no checkpoint, ddp"


def baseline_metrics(answers: Answers) -> dict[str, float]:
    """A step is half of two in a row in the slowest rank, as ``pair`` is taken.

    Another rank may be the slowest in each single step: their sum is more than any rank took.
    """
    pairs = [
        max(sum(answer["steps"][at : at + 2]) for answer in answers)
        for at in range(0, len(answers[0]["steps"]) - 1, 2)
    ]
    return {"step": statistics.median(pairs) / 2 * 1e3, "step_cpu": answers[0]["cpu"]}


def save_metrics(answers: Answers, *, durable: bool) -> dict[str, float]:
    """The slowest rank counts; ``pair`` and ``cpu`` still hold two steps of training."""
    slowest = {
        key: max(answer[key] for answer in answers) for key in ("blocking", "pair", "durable")
    }
    found = {
        "blocking": slowest["blocking"] * 1e3,
        "pair": slowest["pair"] * 1e3,
        "cpu": answers[0]["cpu"],
    }
    preparations = [a["preparation"] for a in answers if a["preparation"] is not None]
    if preparations:
        found["preparation"] = max(preparations) * 1e3
    if durable:
        found["durable"] = slowest["durable"]
        found["written"] = answers[0]["written"] / 1e6
    else:
        found["preparation"] = found["blocking"]
    return found


def course_metrics(answers: Answers, steps: int) -> dict[str, float]:
    """The slowest rank counts; ``total`` is all of it, a step's share."""

    def slowest(key: str) -> float:
        return max(answer[key] for answer in answers)

    run = slowest("run")
    found = {"run": run / steps * 1e3, "total": run / steps * 1e3}
    if "stop" in answers[0]:
        found["stop"] = slowest("stop")
        found["total"] = (run + found["stop"]) / steps * 1e3
        found["taken"] = answers[0]["taken"]
        found["written"] = answers[0]["written"] / 1e6
        for tier in answers[0]["tiers"]:
            found[f"stop_{tier}"] = max(answer["tiers"].get(tier, 0.0) for answer in answers)
    return found


def derive_course(measured: Round) -> None:
    """Relative to plain DistributedDataParallel of the same round, for everybody.

    So the price of a trainer's own step is in it, whichever way it goes.
    """
    base = measured.get(DDP_BASELINE, {})
    if not base:
        return
    for metrics in measured.values():
        for key in ("run", "total"):
            if key in metrics:
                metrics[f"{key}_ddp"] = (metrics[key] / base["run"] - 1) * 100


def derive(measured: Round) -> None:
    """Costs beyond training: what the same round's baseline of the same trainer takes is taken off.

    Ours is held against our own trainer without checkpoints, peers against DistributedDataParallel:
    otherwise a faster or slower gradient exchange would look like a cost of checkpoints.
    """
    for name, metrics in measured.items():
        pair, cpu = metrics.pop("pair", None), metrics.get("cpu")
        base = measured.get(OURS_BASELINE if name.startswith("sapwood") else DDP_BASELINE, {})
        if pair is None or not base:
            metrics.pop("cpu", None)
            continue
        metrics["overhead"] = pair - 2 * base["step"]
        metrics["overhead_step"] = metrics["overhead"] / base["step"] * 100
        metrics["overhead_run"] = metrics["overhead"] / (EVERY * base["step"]) * 100
        if cpu is not None:
            metrics["cpu"] = cpu - 2 * base["step_cpu"]
