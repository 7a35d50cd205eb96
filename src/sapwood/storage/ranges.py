"""Which ranges of an object are read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood.errors import Truncated

__all__ = ["WASTE", "Pieces", "Run", "check_within", "runs_of"]

WASTE = 0.1
"""The most that is read beyond what was asked for, as a share of that."""

Pieces = Sequence[tuple[int, memoryview]]
"""Where in an object, and the memory to fill."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of an object that are read in one piece."""

    start: int
    stop: int
    pieces: Pieces
    """In order of their places; they may overlap."""

    def fill(self, at: int, data: memoryview) -> None:
        """Give each piece its part of some of the run's bytes, which begin at ``at``."""
        end = at + len(data)
        for start, out in self.pieces:
            begin, stop = max(at, start), min(end, start + len(out))
            if begin < stop:
                out[begin - start : stop - start] = data[begin - at : stop - at]


def runs_of(pieces: Pieces, *, gap: int, waste: float = WASTE) -> list[Run]:
    """The fewest runs that read at most ``waste`` more than was asked for, and no gap over ``gap``.

    Pieces that touch or overlap are always one run; the shortest gaps are read over first.
    """
    ordered = sorted(((at, out) for at, out in pieces if len(out)), key=lambda piece: piece[0])
    blocks: list[tuple[int, int, list[tuple[int, memoryview]]]] = []
    for at, out in ordered:
        end = at + len(out)
        if blocks and at <= blocks[-1][1]:
            start, stop, mine = blocks[-1]
            mine.append((at, out))
            blocks[-1] = (start, max(stop, end), mine)
        else:
            blocks.append((at, end, [(at, out)]))
    bridged = _bridged([(start, stop) for start, stop, _ in blocks], gap, waste)
    runs: list[Run] = []
    for number, (start, stop, mine) in enumerate(blocks):
        if number in bridged:
            last = runs[-1]
            runs[-1] = Run(last.start, stop, [*last.pieces, *mine])
        else:
            runs.append(Run(start, stop, mine))
    return runs


def _bridged(blocks: Sequence[tuple[int, int]], gap: int, waste: float) -> set[int]:
    """The blocks that are read together with the one before."""
    budget = int(waste * sum(stop - start for start, stop in blocks))
    gaps = sorted((blocks[n][0] - blocks[n - 1][1], n) for n in range(1, len(blocks)))
    found = set()
    for size, number in gaps:
        if size > min(gap, budget):
            break
        budget -= size
        found.add(number)
    return found


def check_within(key: str, size: int, pieces: Pieces) -> None:
    """See that an object has all that is asked of it.

    Raises:
        Truncated: it has not.
    """
    for at, out in pieces:
        if at + len(out) > size:
            raise Truncated(
                f"{key} has {size} bytes, but bytes {at} to {at + len(out)} were asked for; it "
                "was truncated, or whoever asks takes it for another"
            )
