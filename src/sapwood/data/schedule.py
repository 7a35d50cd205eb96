"""Which batches come next, and what of them is whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.data.order import Order
from sapwood.data.position import Position

__all__ = ["Asked", "Schedule"]

Ints = NDArray[np.int64]
_BLOCK = 2**14
"""About so many records are drawn at once: the cost of drawing is by call, hardly by record."""
_MOST = 64


class Asked(NamedTuple):
    """A batch, and the records of it that each of some ranks gets."""

    epoch: int
    number: int
    parts: list[Ints]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The batches of one worker of a rank; most ranks have one, and it has all batches."""

    order: Order
    world: int
    worker: int = 0
    workers: int = 1

    def batches(
        self, position: Position, stop: int | None, ranks: Sequence[int]
    ) -> Iterator[Asked]:
        """Batches from a position up to an epoch, with the parts of these ranks."""
        order, epoch, first = self.order, position.epoch, position.batch
        block = min(max(_BLOCK // order.spec.batch, 1), _MOST) * self.workers
        while stop is None or epoch < stop:
            last = min(first + block, order.batches)
            numbers = self._mine(epoch, first, last, position.origin or 0)
            parts = [order.parts(epoch, numbers, rank=one, world=self.world) for one in ranks]
            for number, some in zip(numbers, zip(*parts, strict=True), strict=True):
                yield Asked(epoch, number, list(some))
            epoch, first = (epoch, last) if last < order.batches else (epoch + 1, 0)

    def later(self, position: Position, batches: int) -> Position:
        """The position after so many batches of this worker."""
        done = position.epoch * self.order.batches + position.batch + batches * self.workers
        epoch, batch = divmod(done, self.order.batches)
        return replace(position, epoch=epoch, batch=batch)

    def _mine(self, epoch: int, first: int, last: int, origin: int) -> list[int]:
        # A DataLoader asks its workers in turn, beginning with the first one.
        base = epoch * self.order.batches - origin
        return [one for one in range(first, last) if (base + one) % self.workers == self.worker]
