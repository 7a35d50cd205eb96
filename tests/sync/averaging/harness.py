"""An averager without an engine on top, and what it must give, added up by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sapwood.runtime.group import Group
from sapwood.sync.averaging import Averaging, choose_averager
from sapwood.sync.averaging.slices import cut

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Sizes = Sequence[tuple[int, torch.dtype]]


@contextmanager
def averaging(wanted: str = "node", timeout: float = 60.0) -> Iterator[tuple[Group, Averaging]]:
    group = Group.join(CPU, timeout=timeout)
    try:
        chosen = choose_averager(group, wanted)  # type: ignore[arg-type]
        try:
            yield group, chosen
        finally:
            chosen.averager.close()
    finally:
        group.close()


def given(rank: int, bucket: int, turn: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, so that another order of summing gives other bits."""
    generator = torch.Generator().manual_seed(rank * 1_000_003 + bucket * 1009 + turn)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 4, (length,), generator=generator)).to(dtype)


class ByHand:
    """Sums in the order of ranks inside a machine, then one all-reduce for each lane."""

    def __init__(self, machines: Sequence[Sequence[int]], rank: int) -> None:
        self._machines = machines
        self._mine = next(m for m in machines if rank in m)
        self._lanes = min(len(m) for m in machines)
        self._wires: list[dist.ProcessGroup] = []
        if len(machines) > 1:
            # One rank of each machine adds up everything, lane after lane.
            firsts = [m[0] for m in machines]
            self._wires = [dist.new_group(firsts) for _ in range(self._lanes)]
        self._first = self._mine[0] == rank

    def sum(self, bucket: int, turn: int, length: int, dtype: torch.dtype) -> Tensor | None:
        """The average, on the first rank of each machine."""
        if not self._first:
            return None
        wide = torch.float32 if dtype.itemsize == 2 and len(self._mine) > 1 else dtype
        parts = [given(r, bucket, turn, length, dtype).to(wide) for r in self._mine]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total = total.to(dtype)
        for wire, mine in zip(self._wires, cut(length, dtype.itemsize, self._lanes), strict=False):
            part = total[mine].clone()
            dist.all_reduce(part, group=wire)
            total[mine] = part
        return total
