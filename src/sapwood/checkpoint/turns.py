"""Which tiers a checkpoint goes to, where a tier takes only every n-th of them.

What decides is how many checkpoints were due before, which is the same number on every rank. It is
not how many this rank has saved: a rank that skipped one would from then on bring its shards to a
tier at other steps than the others do theirs, and no checkpoint would ever be whole there again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood.tiers.spec import TierSpec

__all__ = ["Turns"]


class Turns:
    """Counts checkpoints as they become due, whatever becomes of them on this rank."""

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        """The first checkpoint goes to all tiers."""
        self._specs = tuple(specs)
        self._count = -1
        self._step: int | None = None

    def start(self) -> None:
        """Steps are counted from elsewhere now: one that comes again is another checkpoint."""
        self._step = None

    def come(self, step: int) -> None:
        """The step that has just ended is to be saved, by all ranks; telling it twice is once."""
        if step != self._step:
            self._step = step
            self._count += 1

    @property
    def count(self) -> int:
        """How many were due before the latest; the same on every rank."""
        return self._count

    def tiers(self, *, everywhere: bool = False) -> tuple[str, ...]:
        """Where the latest goes; ``everywhere``: as if it were the turn of every tier."""
        return tuple(s.kind for s in self._specs if everywhere or self._count % s.every == 0)
