"""Runs cases: contenders take turns in short rounds, so that a disturbance hits all of them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import machine
from .cases import Case
from .model import Benchmark, NotRun, Plan, Round, Samples, Session
from .ranks import RankFailed

Report = Callable[[str], None]


def mixed(names: Sequence[str], turn: int) -> list[str]:
    """Another contender begins each round, and the others follow in another order.

    Being first after a pause is an advantage or a cost, and so is whom one comes after: memory that
    a process has just freed is cheaper to touch than memory the machine must find.
    """
    first = names[turn % len(names)]
    others = [name for name in names if name != first]
    random.Random(turn).shuffle(others)
    return [first, *others]


def enough(done: int, elapsed: float, plan: Plan) -> bool:
    if done < plan.min_rounds:
        return False
    return done >= plan.max_rounds or elapsed >= plan.seconds_per_case


def run_rounds(
    benchmark: Benchmark, session: Session, names: Sequence[str], plan: Plan, report: Report
) -> list[Round]:
    rounds: list[Round] = []
    started = time.monotonic()
    while not enough(len(rounds), time.monotonic() - started, plan):
        measured: Round = {}
        for name in mixed(names, len(rounds)):
            report(f"round {len(rounds) + 1}: {name}")
            measured[name] = dict(session.measure(name))
        benchmark.derive(measured)
        rounds.append(measured)
    return rounds


def gather(rounds: Sequence[Round]) -> Samples:
    samples: Samples = {}
    for measured in rounds:
        for name, metrics in measured.items():
            for metric, value in metrics.items():
                samples.setdefault(name, {}).setdefault(metric, []).append(value)
    return samples


def merge(samples: Samples, more: Samples) -> None:
    for name, metrics in more.items():
        for metric, values in metrics.items():
            samples.setdefault(name, {}).setdefault(metric, []).extend(values)


def run_case(
    benchmark: Benchmark, case: Case, names: Sequence[str], plan: Plan, report: Report
) -> dict[str, Any]:
    """One case's record. A case that fails is reported as such: the others' figures stand."""
    result: dict[str, Any] = {"case": case, "load_before": machine.load_average()}
    started, meter = time.monotonic(), machine.Meter()
    try:
        result |= measure_case(benchmark, case, names, plan, report)
    except NotRun as reason:
        result |= {"status": "not run", "reason": str(reason)}
    except RankFailed as error:
        print(error, file=sys.stderr)
        # A traceback names files of this machine, and results are kept: the last line says why.
        result |= {"status": "failed", "reason": str(error).splitlines()[-1]}
    result["others"] = meter.read()
    result["load_after"] = machine.load_average()
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def measure_case(
    benchmark: Benchmark, case: Case, names: Sequence[str], plan: Plan, report: Report
) -> dict[str, Any]:
    report("starting")
    session = benchmark.open(case, names, plan.options)
    try:
        rounds = run_rounds(benchmark, session, names, plan, report)
        report("closing measurements")
        extra = session.finish()
    finally:
        session.close()
    samples = gather(rounds)
    merge(samples, extra.samples)
    return {
        "status": "failed checks" if extra.failed_checks else "measured",
        "rounds": len(rounds),
        "samples": samples,
        "facts": extra.facts,
        "failed_checks": extra.failed_checks,
    }
