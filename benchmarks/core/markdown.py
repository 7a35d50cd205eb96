"""A run as Markdown, and its section in RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .cases import label
from .judge import best_peer
from .model import Benchmark, Metric, Samples
from .stats import Ratio, ratio_of_medians, summarise

HEAD = "# Benchmark results\n\nEach section is written by one benchmark; see README.md.\n"


def replace_section(text: str, name: str, body: str) -> str:
    """``text`` with the section of benchmark ``name`` replaced, or added at the end."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{body.strip()}\n{end}"
    before, found, rest = (text or HEAD).partition(begin)
    if not found:
        return f"{before.rstrip()}\n\n{section}\n"
    _, closed, after = rest.partition(end)
    if not closed:
        raise SystemExit(f"RESULTS.md: {begin!r} has no {end!r} after it; put it back")
    return f"{before}{section}{after}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    found = summarise(values)
    text = number(found.median, digits)
    if found.n == 1:
        return f"{text} (n=1)"
    return f"{text} ({number(found.p10, digits)} - {number(found.p90, digits)}, n={found.n})"


def shown(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if "samples" in result]


def metric_table(
    metric: Metric, names: Sequence[str], results: Sequence[dict[str, Any]]
) -> str | None:
    def values(result: dict[str, Any], name: str) -> list[float]:
        return result["samples"].get(name, {}).get(metric.name, [])

    columns = [name for name in names if any(values(result, name) for result in shown(results))]
    rows = [
        [label(result["case"]), *(cell(values(result, name), metric.digits) for name in columns)]
        for result in shown(results)
        if any(values(result, name) for name in columns)
    ]
    if not rows:
        return None
    heading = f"**{metric.name}** [{metric.unit}], {metric.better} is better: {metric.meaning}"
    return f"{heading}\n\n{table(['case', *columns], rows)}"


def ratio_text(ratio: Ratio) -> str:
    if math.isnan(ratio.value):
        return "-"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def ratio_row(benchmark: Benchmark, samples: Samples, metric: Metric) -> list[str] | None:
    ours = next(iter(benchmark.named("ours")), "")
    values = samples.get(ours, {}).get(metric.name, [])
    peer = best_peer(benchmark, samples, metric)
    if not values or peer is None:
        return None
    best = ratio_text(ratio_of_medians(values, samples[peer][metric.name]))
    others = []
    for name in benchmark.named("peer"):
        theirs = samples.get(name, {}).get(metric.name, [])
        others.append(ratio_text(ratio_of_medians(theirs, values)) if theirs else "-")
    for name in benchmark.named("limit"):
        floor = samples.get(name, {}).get(metric.name, [])
        others.append(ratio_text(ratio_of_medians(values, floor)) if floor else "-")
    return [f"**{best}** ({peer})", *others]


def ratio_table(
    benchmark: Benchmark, metric: Metric, results: Sequence[dict[str, Any]]
) -> str | None:
    rows = []
    for result in shown(results):
        row = ratio_row(benchmark, result["samples"], metric)
        if row is not None:
            rows.append([label(result["case"]), *row])
    if not rows:
        return None
    header = [
        *("case", "ours / best peer"),
        *(f"{name} / ours" for name in benchmark.named("peer")),
        *(f"ours / {name}" for name in benchmark.named("limit")),
    ]
    heading = f"**Ratios of {metric.name}**, medians, with the 95 % bootstrap interval"
    return f"{heading}\n\n{table(header, rows)}"


def notes(benchmark: Benchmark, names: Sequence[str]) -> str:
    chosen = [contender for contender in benchmark.contenders if contender.name in names]
    rows = [[contender.name, contender.role, contender.note] for contender in chosen]
    return table(["contender", "role", "setting"], rows)


def verdicts(run: dict[str, Any]) -> str | None:
    rows = [[item["text"], item["verdict"], item["detail"]] for item in run["targets"]]
    return table(["target", "verdict", "figure"], rows) if rows else None


def remarks(run: dict[str, Any]) -> str | None:
    """What the tables cannot show: cases not run, checks that failed, facts of single cases."""
    lines = [f"- warning: {text}" for text in run["warnings"]]
    for result in run["cases"]:
        case = label(result["case"])
        if result["status"] in ("not run", "failed"):
            lines.append(f"- **{result['status']}**: {case}: {result['reason']}")
        lines += [f"- **check failed**: {case}: {text}" for text in result.get("failed_checks", [])]
        found = result.get("facts", {})
        if found:
            lines.append(f"- {case}: " + "; ".join(f"{key} {found[key]}" for key in found))
    return "\n".join(lines) if lines else None


def machine_line(run: dict[str, Any]) -> str:
    facts = "; ".join(f"{key} {value}" for key, value in run["machine"].items())
    before, after = run["load_before"][0], run["load_after"][0]
    return (
        f"{run['mode']} run of {run['date']}, {run['seconds']:.0f} s. {facts}. "
        f"Load average before {before}, after {after}."
    )


def render(benchmark: Benchmark, run: dict[str, Any]) -> str:
    names, results = run["contenders"], run["cases"]
    parts: list[str | None] = [
        f"## {benchmark.name}",
        benchmark.question,
        machine_line(run),
        verdicts(run),
        *(ratio_table(benchmark, metric, results) for metric in benchmark.metrics if metric.ratios),
        "Cells below: median (p10 - p90, n = number of samples).",
        *(metric_table(metric, names, results) for metric in benchmark.metrics),
        notes(benchmark, names),
        remarks(run),
    ]
    return "\n\n".join(part for part in parts if part)
