"""The one harness all benchmarks share: declare cases, contenders and targets; it does the rest."""

from .cases import Case, expand, label, parse_filters
from .cli import main
from .judge import Target
from .model import Benchmark, Contender, Extra, Metric, NotRun, Plan, Session
from .ranks import RankFailed, RankGroup, Spot
from .stats import Ratio, Summary, ratio_of_medians, summarise

__all__ = [
    "Benchmark",
    "Case",
    "Contender",
    "Extra",
    "Metric",
    "NotRun",
    "Plan",
    "RankFailed",
    "RankGroup",
    "Ratio",
    "Session",
    "Spot",
    "Summary",
    "Target",
    "expand",
    "label",
    "main",
    "parse_filters",
    "ratio_of_medians",
    "summarise",
]
