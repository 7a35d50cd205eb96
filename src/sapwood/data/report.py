"""What reading cost each rank of a run, from its trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sapwood.data.check import require_instance
from sapwood.data.skew import skew_of
from sapwood.data.stats import ReadStats
from sapwood.trace.read import Instant, Trace

__all__ = ["Reading", "readings_of"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a rank read of one file, up to the end of its last pass."""

    rank: int
    file: str
    stats: ReadStats
    """With ``skew_seconds`` from the traces of all ranks, where readers do not know it."""


def readings_of(trace: Trace) -> list[Reading]:
    """One for each rank and file of which the trace has sums; by file, then by rank."""
    require_instance("trace", trace, Trace)
    sums: dict[tuple[str, int], dict[str, Any]] = {}
    for one in trace.records:
        if isinstance(one, Instant) and one.name == "data read":
            file = str(one.args.get("file", ""))
            sums[file, one.rank] = dict(one.args)  # sums only grow: the last one is the latest
    # Batches bear no file, so that those of several cannot be told apart.
    skew = skew_of(trace) if len({file for file, _ in sums}) == 1 else {}
    found = []
    for (file, rank), args in sorted(sums.items()):
        stats = ReadStats(**{one.name: args[one.name] for one in fields(ReadStats)})
        stats.sizes = {int(size): count for size, count in stats.sizes.items()}
        stats.skew_seconds = stats.skew_seconds or skew.get(rank, 0.0)
        found.append(Reading(rank=rank, file=file, stats=stats))
    return found
