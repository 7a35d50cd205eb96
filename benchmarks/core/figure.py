"""One figure per benchmark: the first metric, a panel per case, a bar per contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import label
from .model import Benchmark
from .stats import summarise

COLOURS = {
    "ours": "#2a7f4f",
    "variant": "#8cc9a4",
    "peer": "#4a6fa5",
    "baseline": "#b9b9b9",
    "limit": "#d9a441",
}


def draw(benchmark: Benchmark, results: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Writes ``stem``.png and .svg; the caller keeps them out of git."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [result for result in results if "samples" in result]
    if not measured:
        return []
    columns = min(3, len(measured))
    rows = -(-len(measured) // columns)
    size = (5.2 * columns, 0.8 + 2.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(measured) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, measured, strict=False):
        panel(axis, benchmark, result)
    figure.suptitle(f"{benchmark.name}: {benchmark.metrics[0].name}, median and p10 - p90")
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return paths


def panel(axis: Any, benchmark: Benchmark, result: dict[str, Any]) -> None:
    metric = benchmark.metrics[0]
    found = {
        contender: summarise(result["samples"].get(contender.name, {}).get(metric.name, []))
        for contender in benchmark.contenders
    }
    bars = [(contender, summary) for contender, summary in found.items() if summary.n]
    bars.reverse()
    middle = [summary.median for _, summary in bars]
    low = [summary.median - summary.p10 for _, summary in bars]
    high = [summary.p90 - summary.median for _, summary in bars]
    colours = [COLOURS[contender.role] for contender, _ in bars]
    names = [contender.name for contender, _ in bars]
    axis.barh(names, middle, xerr=[low, high], color=colours, error_kw={"elinewidth": 1})
    axis.set_title(label(result["case"]), fontsize=9)
    axis.set_xlabel(metric.unit, fontsize=8)
    axis.tick_params(labelsize=8)
