"""Who has posted and who has summed which bucket, and what can be done next.

Plain bookkeeping without threads or I/O. A cell holds the round in which its rank last did it,
is written only on that rank's word and never reset: a neighbour may be a round ahead of us.
"""

from __future__ import annotations

from collections import defaultdict

__all__ = ["Table"]


class Table:
    """The cells of one layout."""

    def __init__(self, members: int, lanes: int) -> None:
        """``members`` ranks on this machine, of which the first ``lanes`` sum a slice each."""
        self._posted: defaultdict[int, list[int]] = defaultdict(lambda: [0] * members)
        self._summed: defaultdict[int, list[int]] = defaultdict(lambda: [0] * lanes)

    def posted(self, bucket: int, member: int, turn: int) -> None:
        """``member`` has posted ``bucket``."""
        _advance(self._posted[bucket], member, turn)

    def summed(self, bucket: int, lane: int, turn: int) -> None:
        """The slice of ``lane`` is complete."""
        _advance(self._summed[bucket], lane, turn)

    def can_sum(self, bucket: int, turn: int) -> bool:
        """Whether every member has posted the bucket."""
        return min(self._posted[bucket]) >= turn

    def complete(self, bucket: int, turn: int) -> bool:
        """Whether every slice is there."""
        return min(self._summed[bucket]) >= turn

    def missing(self, bucket: int, turn: int) -> tuple[list[int], list[int]]:
        """Members that have not posted, and lanes that have not summed."""
        posted, summed = self._posted[bucket], self._summed[bucket]
        return (
            [m for m, at in enumerate(posted) if at < turn],
            [lane for lane, at in enumerate(summed) if at < turn],
        )


def _advance(cells: list[int], place: int, turn: int) -> None:
    # A bucket has one piece of memory: whoever posts it again has seen its last average applied.
    if turn <= cells[place]:
        raise ConnectionError(f"round {turn} was announced after round {cells[place]}")
    cells[place] = turn
