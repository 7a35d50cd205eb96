"""Declared targets, judged on the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .cases import Case, label
from .model import Benchmark, Metric, Samples
from .stats import Ratio, ratio_of_medians, summarise


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on ours over the best peer, or on ours alone, that holds in every case it covers.

    ``among`` names the contenders ours is compared with, where not all peers are meant: some of
    them, or a limit. ``contender`` names one of ours that is not the default. With ``doubt`` a case
    holds as long as the interval does not say otherwise.
    """

    text: str
    metric: str
    at: Literal["most", "least"]
    bound: float
    of: Literal["ours / best peer", "ours"] = "ours / best peer"
    contender: str = ""
    among: Sequence[str] = ()
    doubt: bool = False
    where: Callable[[Case], bool] = lambda case: True

    def holds(self, figure: Ratio) -> bool:
        if self.at == "most":
            return (figure.low if self.doubt else figure.value) <= self.bound
        return (figure.high if self.doubt else figure.value) >= self.bound


@dataclass(frozen=True, kw_only=True)
class Verdict:
    text: str
    verdict: Literal["met", "missed", "not judged"]
    detail: str
    figures: dict[str, float]


def medians(samples: Samples, names: Sequence[str], metric: str) -> dict[str, float]:
    measured = {name: samples.get(name, {}).get(metric, []) for name in names}
    return {name: summarise(values).median for name, values in measured.items() if values}


def best_peer(
    benchmark: Benchmark, samples: Samples, metric: Metric, among: Sequence[str] = ()
) -> str | None:
    found = medians(samples, among or benchmark.named("peer"), metric.name)
    pick = min if metric.better == "lower" else max
    return pick(found, key=lambda name: found[name]) if found else None


def ours_over_best(
    benchmark: Benchmark,
    samples: Samples,
    metric: Metric,
    among: Sequence[str] = (),
    contender: str = "",
) -> Ratio | None:
    peer = best_peer(benchmark, samples, metric, among)
    ours = contender or next(iter(benchmark.named("ours")), "")
    values = samples.get(ours, {}).get(metric.name, [])
    if peer is None or not values:
        return None
    return ratio_of_medians(values, samples[peer][metric.name])


def figure_of(target: Target, benchmark: Benchmark, samples: Samples) -> Ratio | None:
    metric = next(metric for metric in benchmark.metrics if metric.name == target.metric)
    if target.of == "ours / best peer":
        return ours_over_best(benchmark, samples, metric, target.among, target.contender)
    name = target.contender or next(iter(benchmark.named("ours")), "")
    values = samples.get(name, {}).get(metric.name, [])
    if not values:
        return None
    found = summarise(values)
    return Ratio(found.median, found.p10, found.p90)


def judge(target: Target, benchmark: Benchmark, results: Sequence[dict[str, Any]]) -> Verdict:
    figures: dict[str, Ratio] = {}
    missing = []
    for result in results:
        if not target.where(result["case"]):
            continue
        figure = figure_of(target, benchmark, result.get("samples", {}))
        if figure is None or math.isnan(figure.value):
            missing.append(label(result["case"]))
        else:
            figures[label(result["case"])] = figure
    return verdict_on(target, figures, missing)


def verdict_on(target: Target, figures: dict[str, Ratio], missing: Sequence[str]) -> Verdict:
    plain = {case: figure.value for case, figure in figures.items()}
    if not figures:
        return Verdict(
            text=target.text, verdict="not judged", detail="no case has the figures", figures=plain
        )
    pick = max if target.at == "most" else min
    worst = pick(figures, key=lambda case: figures[case].value)
    bad = [case for case, figure in figures.items() if not target.holds(figure)]
    unsure = [case for case, figure in figures.items() if figure.low <= target.bound <= figure.high]
    detail = (
        f"worst {figures[worst].value:.3g} ({worst}), bound {target.bound:g}; "
        f"{len(figures) - len(bad)} of {len(figures)} cases hold"
    )
    if unsure:
        detail += f"; the bound lies inside the interval of {len(unsure)}"
    if missing:
        detail += f"; no figures for {len(missing)} more"
    return Verdict(
        text=target.text, verdict="missed" if bad else "met", detail=detail, figures=plain
    )
