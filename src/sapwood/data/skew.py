"""How unevenly ranks got their batches, from their traces."""

from __future__ import annotations

from sapwood.data.check import require_instance
from sapwood.trace.read import Span, Trace

__all__ = ["skew_of"]


def skew_of(trace: Trace) -> dict[int, float]:
    """Seconds each rank would have waited for the slowest, if all asked for each batch together.

    That is how it is in training, where ranks wait for each other after every step: for each batch
    it is the time the slowest rank needed to get its part, less the time this rank needed.
    """
    require_instance("trace", trace, Trace)
    batches: dict[tuple[object, object], dict[int, int]] = {}
    for one in trace.records:
        if isinstance(one, Span) and one.name == "batch" and one.lane == "data":
            which = one.args.get("epoch"), one.args.get("batch")
            batches.setdefault(which, {})[one.rank] = one.end - one.start
    sums = dict.fromkeys(sorted(rank for times in batches.values() for rank in times), 0)
    for times in batches.values():
        slowest = max(times.values())
        for rank, took in times.items():
            sums[rank] += slowest - took
    return {rank: nanoseconds / 1e9 for rank, nanoseconds in sums.items()}
