"""One all-reduce of the process group for each bucket: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sapwood.runtime.group import Group
from sapwood.sync.averaging.base import BucketMemory, Pending

__all__ = ["DirectAverager"]


class DirectAverager:
    """Sums in place. Fulfils ``Averager``."""

    name = "direct"

    def __init__(self, group: Group) -> None:
        """Use the group's own communicator."""
        self._group = group
        self._buckets: list[BucketMemory] = []

    def lay_out(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[BucketMemory]:
        """Memory of this rank's own, on its device."""
        self._buckets = []
        for length, dtype in sizes:
            flat = torch.zeros(length, dtype=dtype, device=self._group.device)
            self._buckets.append(BucketMemory(contribution=flat, average=flat))
        return self._buckets

    def launch(self, bucket: int, what: str) -> Pending:
        """Start an all-reduce."""
        return self._group.all_reduce(self._buckets[bucket].average, what)

    def close(self) -> None:
        """Only the memory is let go: the communicator is the group's."""
        self._buckets = []
