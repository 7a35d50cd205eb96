"""How good a shuffle is, in numbers that can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sapwood.data.order.chunks import Chunks
from sapwood.data.order.spec import OrderSpec

__all__ = ["Quality", "quality_of"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What a shuffle can do with the records of one epoch."""

    travel: int
    """How far a record may get from its place in the file, in records."""
    apart: int
    """How far two neighbours in the file may get from each other, in records."""
    pool: int
    """Among how many records, all in memory at the same time, a batch is drawn."""
    batches: float
    """How many different batches can be composed of them: the power of ten."""
    score: float
    """``batches`` in parts of what a global shuffle has: 0 is no shuffle, 1 is a global one."""

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"score {self.score:.3f}: a batch is one of 10^{self.batches:.0f} that can be composed "
            f"of {self.pool} records; a record travels up to {self.travel} places, neighbours get "
            f"up to {self.apart} apart"
        )


def quality_of(spec: OrderSpec, chunks: Chunks) -> Quality:
    """Judge an order by arithmetic; nothing is drawn."""
    count = chunks.count
    best = _choices(count, spec.batch)
    if spec.shuffle == "none":
        pool, batches, travel, apart = min(spec.batch, count), 0.0, 0, 1
    elif spec.shuffle == "global":
        pool, batches, travel, apart = count, best, count - 1, count - 1
    else:
        held = min(spec.window * spec.streams, count)
        cells = -(-spec.streams // spec.mixed)
        pool, batches = held, cells * _choices(held / cells, spec.batch / cells)
        # Chunks go anywhere; what is inside of one stays within a window, once or several times.
        apart = min(held * spec.factor, count * spec.factor - 1)
        travel = count - 1 if len(chunks) > 1 else apart
    score = min(batches / best, 1.0) if best > 0 else 1.0
    return Quality(
        travel=travel, apart=apart, pool=pool, batches=batches / math.log(10), score=score
    )


def _choices(of: float, take: float) -> float:
    """The logarithm of the number of ways to take some of a number of things."""
    if take >= of:
        return 0.0
    return math.lgamma(of + 1) - math.lgamma(take + 1) - math.lgamma(of - take + 1)
