"""Where the tensors of one save lie in memory: alignment, and one run of bytes for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sapwood.buffers.freespace import GRANULE
from sapwood.buffers.mapping import PAGE, round_up

__all__ = ["LARGE", "alignment_of", "footprint", "lay_out"]

LARGE = 2**20
"""What is larger begins on a page, so that direct I/O and devices can read it where it is."""


def alignment_of(nbytes: int) -> int:
    """What the start of so many bytes is a multiple of."""
    return PAGE if nbytes > LARGE else GRANULE


def footprint(nbytes: int) -> int:
    """What so many bytes take, up to where the next ones may begin."""
    return round_up(max(nbytes, 1), alignment_of(nbytes))


def lay_out(sizes: Sequence[int], begin: int = 0, room: int | None = None) -> tuple[list[int], int]:
    """Offsets of ``sizes[begin:]`` one after the other, as many as fit in ``room``; and their end.

    The order stays: neighbours in a model are neighbours in memory, and reading some layers in a
    row is one range.
    """
    if room is None and not begin and sizes and max(sizes) <= LARGE:
        # The same as below, in half the time: many small layers, where it counts.
        offsets = [0, *accumulate([size + GRANULE - 1 & -GRANULE for size in sizes])]
        offsets.pop()
        return offsets, offsets[-1] + sizes[-1]
    offsets, at = [], 0
    for number in range(begin, len(sizes)):
        nbytes = sizes[number]
        unit = PAGE if nbytes > LARGE else GRANULE
        start = -(-at // unit) * unit
        if room is not None and start + nbytes > room:
            break
        offsets.append(start)
        at = start + nbytes
    return offsets, at
