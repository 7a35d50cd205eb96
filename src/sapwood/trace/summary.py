"""Numbers per rank out of a trace: step time, waiting, reduces, and how early updates were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sapwood.trace.read import Instant, Span, Trace

__all__ = ["RankSummary", "early_updates", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One row of ``sapwood trace --summary``; ``None`` where the trace does not say."""

    rank: int
    steps: int
    step_ms: float | None
    """Median time from one ``step_ended`` to the next."""
    wait_ms: float | None
    """Median over the steps of the time in ``wait`` spans."""
    reduces: float | None
    """Mean number of ``reduce`` spans per step."""
    early: float | None
    """Share of bucket updates that ended before the last gradient of their step existed."""


def summarise(trace: Trace) -> tuple[RankSummary, ...]:
    """Summarise every rank of a trace."""
    return tuple(_of_rank(trace, rank) for rank in trace.ranks)


def early_updates(trace: Trace, *, rank: int, step: int | None = None) -> tuple[int, int]:
    """How many bucket updates ended before the last gradient of their step existed, of how many.

    Steps without a ``backward_last_gradient`` mark are left out.
    """
    last = {
        mark.args.get("step"): mark.start
        for mark in _instants(trace, rank, "backward_last_gradient")
        if step is None or mark.args.get("step") == step
    }
    ends = [
        (span.args.get("step"), span.end)
        for span in _spans(trace, rank, "update")
        if span.args.get("step") in last
    ]
    return sum(end <= last[of_step] for of_step, end in ends), len(ends)


def _of_rank(trace: Trace, rank: int) -> RankSummary:
    ended = sorted(mark.start for mark in _instants(trace, rank, "step_ended"))
    gaps = [(b - a) / 1e6 for a, b in pairwise(ended)]
    waits: dict[object, float] = {}
    for span in _spans(trace, rank, "wait"):
        step = span.args.get("step")
        waits[step] = waits.get(step, 0.0) + (span.end - span.start) / 1e6
    early, updates = early_updates(trace, rank=rank)
    reduces = sum(1 for _ in _spans(trace, rank, "reduce"))
    return RankSummary(
        rank=rank,
        steps=len(ended),
        step_ms=median(gaps) if gaps else None,
        wait_ms=median(waits.values()) if waits else None,
        reduces=reduces / len(ended) if ended else None,
        early=early / updates if updates else None,
    )


def _instants(trace: Trace, rank: int, name: str) -> Iterable[Instant]:
    return (
        r for r in trace.records if isinstance(r, Instant) and r.rank == rank and r.name == name
    )


def _spans(trace: Trace, rank: int, name: str) -> Iterable[Span]:
    return (r for r in trace.records if isinstance(r, Span) and r.rank == rank and r.name == name)
