"""Looking at many nodes at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.gathering import _LOOKERS, Gathering
from sapwood.tiers.keeper import Blob

NODES = 100  # a multiple of those who wait for each other


class Meeting(BlobFolder):
    """Answers only when others are asked at the same time."""

    def __init__(self, folder: Path, barrier: threading.Barrier, seen: list[int]) -> None:
        super().__init__(folder)
        self._barrier, self._seen = barrier, seen

    def names(self, area: str, group: str = "") -> Sequence[Blob]:
        self._seen.append(sum(t.name.startswith("sapwood-parity") for t in threading.enumerate()))
        self._barrier.wait(10)
        return super().names(area, group)


def test_many_nodes_are_asked_side_by_side_but_not_all_at_once(tmp_path: Path) -> None:
    barrier, seen = threading.Barrier(4), list[int]()
    keepers = {str(n): Meeting(tmp_path / str(n), barrier, seen) for n in range(NODES)}
    assert Gathering(keepers).groups() == []
    assert len(seen) == NODES
    assert max(seen) <= _LOOKERS
