"""How long the members of a host wait for the slowest of them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Skew"]


class Skew:
    """Sums, for each member, the time from having a batch until the last one has it.

    In training that is the time it waits for the others, as ranks go on together.
    """

    def __init__(self, members: Iterable[int]) -> None:
        """Nobody has waited yet."""
        self._sums = dict.fromkeys(members, 0)
        self._open: dict[int, dict[int, int]] = {}

    def note(self, member: int, number: int, when_ns: int) -> None:
        """A member had a batch at this time."""
        self._open.setdefault(number, {})[member] = when_ns

    def close(self, number: int) -> None:
        """All that are still there have had the batches up to this one."""
        for one in [one for one in self._open if one <= number]:
            times = self._open.pop(one)
            last = max(times.values())
            for member, when in times.items():
                self._sums[member] += last - when

    def of(self, member: int) -> int:
        """Nanoseconds so far."""
        return self._sums[member]
