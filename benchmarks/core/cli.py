"""The command line every benchmark has."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import cases, figure, machine, markdown
from .judge import judge
from .kept import Kept
from .model import Benchmark, Plan
from .run import Report, run_case

SCHEMA = 1


def parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=benchmark.question)
    mode = made.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="a minute or two, for sanity (default)")
    mode.add_argument("--full", action="store_true", help="the figures of record")
    made.add_argument(
        "--case", action="append", default=[], metavar="AXIS=VALUE", help="only these cases"
    )
    made.add_argument(
        "--only", default="", metavar="NAMES", help="contenders or roles (ours, peers), by comma"
    )
    made.add_argument("--record", action="store_true", help="write RESULTS.md and results/*.json")
    made.add_argument(
        "--resume", action="store_true", help="go on after the last finished case of a run cut off"
    )
    made.add_argument("--list", action="store_true", help="show cases and contenders, run nothing")
    return made


def chosen_contenders(benchmark: Benchmark, only: str) -> list[str]:
    known = {contender.name: contender.role for contender in benchmark.contenders}
    if not only:
        return list(known)
    groups = {"ours" if role == "ours" else f"{role}s" for role in known.values()}
    wanted = {text.strip() for text in only.split(",")}
    if unknown := wanted - set(known) - groups:
        names = ", ".join([*known, *sorted(groups)])
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is not one of {names}")
    return [name for name, role in known.items() if wanted & {name, role, f"{role}s"}]


def show(benchmark: Benchmark, chosen: Sequence[cases.Case], names: Sequence[str]) -> None:
    print(benchmark.question)
    for case in chosen:
        print(f"case       {cases.label(case)}")
    for contender in benchmark.contenders:
        if contender.name in names:
            print(f"contender  {contender.name} ({contender.role}): {contender.note}")


@contextlib.contextmanager
def progress(total: int) -> Iterator[tuple[Report, Report]]:
    """Two callbacks: a case begins, and something happens in it."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True), lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total, at="")
        begun = itertools.count()

        def begin(text: str) -> None:
            bar.update(task, completed=next(begun), description=text, at="")

        yield begin, lambda text: bar.update(task, at=text)


def run_all(
    benchmark: Benchmark,
    plan: Plan,
    chosen: Sequence[cases.Case],
    names: Sequence[str],
    mode: str,
    kept: Kept,
) -> dict[str, Any]:
    load = machine.load_average()
    warning = machine.load_warning()
    started = time.monotonic()
    results = []
    with progress(len(chosen)) as (begin, report):
        for index, case in enumerate(chosen):
            begin(f"[{index + 1}/{len(chosen)}] {cases.label(case)}")
            result = kept.find(case)
            if result is None:
                result = run_case(benchmark, case, names, plan, report)
                kept.add(result)
            results.append(result)
            if "reason" in result:
                complain(result)
    kept.end()
    warnings = [*([warning] if warning else []), *disturbances(results)]
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)
    return {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "mode": mode,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - started, 1),
        "machine": machine.facts(),
        "load_before": load,
        "load_after": machine.load_average(),
        "warnings": warnings,
        "contenders": list(names),
        "cases": results,
        "targets": [asdict(judge(target, benchmark, results)) for target in benchmark.targets],
    }


def disturbances(results: Sequence[dict[str, Any]]) -> list[str]:
    """Cases beside which other work ran."""
    found = [(result, machine.meter_warning(result["others"])) for result in results]
    measured = [(result, text) for result, text in found if text and "samples" in result]
    return [f"{cases.label(result['case'])}: {text}" for result, text in measured]


def why_not_recorded(run: dict[str, Any], *, whole: bool, asked: bool) -> str | None:
    """The reason, or None: the run goes into the record."""
    if not (whole or asked):
        return "only part of the benchmark ran (--record keeps it)"
    if run["warnings"]:
        return f"{len(run['warnings'])} warnings say that other work disturbed it"
    return None


def complain(result: dict[str, Any]) -> None:
    print(f"{result['status']}: {cases.label(result['case'])}: {result['reason']}", file=sys.stderr)


def record(benchmark: Benchmark, run: dict[str, Any], folder: Path) -> None:
    stored = folder / "results" / f"{benchmark.name}.json"
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(run, indent=1) + "\n")
    page = folder / "RESULTS.md"
    text = page.read_text() if page.exists() else ""
    section = markdown.render(benchmark, run)
    page.write_text(markdown.replace_section(text, benchmark.name, section))


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    given = parser(benchmark).parse_args(arguments)
    plan, mode = (benchmark.full, "full") if given.full else (benchmark.quick, "quick")
    filters = cases.parse_filters(given.case, plan.axes)
    # A filter may ask for a value that only the other plan sweeps.
    axes = {**plan.axes, **{axis: benchmark.full.axes[axis] for axis in filters}}
    possible = cases.select(cases.expand(axes, benchmark.keep), filters)
    chosen = [case for case in possible if plan.keep(case)] or possible
    names = chosen_contenders(benchmark, given.only)
    if not chosen:
        raise SystemExit(f"no case matches {given.case}; --full --list shows them")
    if given.list:
        show(benchmark, chosen, names)
        return 0
    unfinished = machine.HERE / "results" / f"{benchmark.name}-{mode}.unfinished"
    kept = Kept(unfinished, resume=given.resume)
    run = run_all(benchmark, plan, chosen, names, mode, kept)
    print(markdown.render(benchmark, run))
    whole = given.full and not filters and not given.only
    stem = benchmark.name if whole else f"{benchmark.name}-partial"
    figure.draw(benchmark, run["cases"], machine.HERE / "results" / stem)
    reason = why_not_recorded(run, whole=whole, asked=given.record)
    if reason is None:
        record(benchmark, run, machine.HERE)
    elif given.full or given.record:
        print(f"not recorded: {reason}", file=sys.stderr)
    return 1 if any("failed" in result["status"] for result in run["cases"]) else 0
