"""The static plan: which parameters are fused into which bucket, and in which order they go.

Once agreed by all ranks, a plan needs no negotiation: every rank sends the same buckets in the
same order in every step, whatever its own step did (a parameter without a gradient counts as
zero and says so in a flag that travels with the bucket).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sapwood.runtime.group import Group

__all__ = ["Plan", "agree_order", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Indices of parameters by bucket, and those no rank uses (dormant), which travel on demand."""

    buckets: tuple[tuple[int, ...], ...]
    dormant: tuple[int, ...]
    reason: str

    @property
    def order(self) -> tuple[int, ...]:
        """The planned parameters in the order they are expected."""
        return tuple(i for bucket in self.buckets for i in bucket)


def lay_out(
    order: Sequence[int],
    parameters: Sequence[Tensor],
    *,
    first_bytes: int,
    bucket_bytes: int,
    reason: str,
) -> Plan:
    """Fuse neighbours in ``order``: a small first bucket to start early, and small last ones.

    What is sent last travels when there is nothing left to compute, so a bucket takes at most half
    of what is left, down to a quarter of its size. It holds one dtype. A parameter larger than a
    bucket has one of its own.
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    room = first_bytes
    left = sum(_size(parameters[i]) for i in order)
    for i in order:
        size = _size(parameters[i])
        other_kind = bool(current) and parameters[current[0]].dtype != parameters[i].dtype
        if current and (size > room or other_kind):
            buckets.append(tuple(current))
            current, room = [], max(bucket_bytes // 4, min(bucket_bytes, left // 2))
        current.append(i)
        room -= size
        left -= size
    if current:
        buckets.append(tuple(current))
    planned = set(order)
    dormant = tuple(i for i in range(len(parameters)) if i not in planned)
    return Plan(buckets=tuple(buckets), dormant=dormant, reason=reason)


def _size(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def agree_order(group: Group, mine: Sequence[int]) -> list[int]:
    """One order for all ranks: rank 0's, then what only other ranks use, last registered first."""
    text = json.dumps(list(mine))
    odd = group.compare_with_rank0("agreeing on the order of gradients", text, text)
    if not odd:
        return list(mine)
    order: list[int] = json.loads(odd.pop(0))
    only_others = {i for theirs in odd.values() for i in json.loads(theirs)} - set(order)
    return order + sorted(only_others, reverse=True)
