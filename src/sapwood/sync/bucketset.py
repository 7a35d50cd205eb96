"""The buckets of one plan, and the memory they work in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from sapwood.sync.averaging import BucketMemory
from sapwood.sync.base import Context
from sapwood.sync.bucket import Bucket, Slot
from sapwood.sync.optim import OptimizerView
from sapwood.sync.plan import Plan

__all__ = ["STATUS_FLAGS", "BucketSet"]

STATUS_FLAGS = 3
"""Flags that travel with the last planned bucket."""


class BucketSet:
    """Planned buckets, in the order they are launched, and dormant ones for all the rest."""

    def __init__(self, context: Context, plan: Plan, settle: Callable[[], None]) -> None:
        """``settle`` waits for averages, when somebody looks at one."""
        self._context = context
        self._settle = settle
        # Without a planned parameter the status flags still need a bucket to travel in.
        layout = plan.buckets or ((),)
        last = len(layout) - 1
        self.planned = [
            self._bucket(n, members, STATUS_FLAGS if n == last else 0)
            for n, members in enumerate(layout)
        ]
        kinds: dict[torch.dtype, list[int]] = {}
        for index in plan.dormant:
            kinds.setdefault(context.parameters[index].dtype, []).append(index)
        self.dormant = [
            self._bucket(last + 1 + n, tuple(members)) for n, members in enumerate(kinds.values())
        ]
        by_index = {s.index: s for b in self for s in b.slots}
        self.slots: list[Slot] = [by_index[i] for i in range(len(context.parameters))]
        self._memory: list[BucketMemory] = []
        self._private: bool | None = None
        if context.group.world > 1:
            sizes = [(b.length, b.dtype) for b in self.planned]
            self._memory = context.averaging.averager.lay_out(sizes)
        for bucket in self.planned:
            bucket.optimizer = self._view(bucket)

    def __iter__(self) -> Iterator[Bucket]:
        """All buckets."""
        yield from self.planned
        yield from self.dormant

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each planned bucket."""
        return tuple(b.names for b in self.planned if b.slots)

    def follow(self, *, keeps_gradients: bool) -> None:
        """Call at the start of a step: who may write to gradients decides where they lie."""
        private = self._context.mode != "layerwise" or not keeps_gradients
        if private == self._private:
            return
        self._private = private
        for bucket, memory in zip(self.planned, self._memory, strict=False):
            bucket.use(memory, private=private, settle=self._settle)
        for bucket in self:
            bucket.alone(private=private)

    def release(self) -> None:
        """Let go of the memory; a ``p.grad`` that lies in it becomes a copy of the model's own.

        Other ranks of the machine read the same memory, and a backward without the run would add
        to it.
        """
        for bucket in self:
            bucket.release()
        self._memory = []

    def look_again(self) -> None:
        """Before a late update: find gradients the user gave to parameters that had none."""
        for bucket in self:
            bucket.look_again()
            if bucket.present and bucket.optimizer is None:
                bucket.optimizer = self._view(bucket)

    def dormant_used(self) -> bool:
        """Whether this rank has a gradient outside the plan."""
        return any(s.parameter.grad is not None for b in self.dormant for s in b.slots)

    def average_dormant(self, step: int) -> Iterator[Bucket]:
        """Average the gradients outside the plan, one bucket after the other."""
        for bucket in self.dormant:
            memory = self._wake(bucket)
            bucket.seal()
            bucket.note_versions()
            if memory is not None:
                what = f"averaging gradients outside the plan in step {step}"
                self._context.group.all_reduce(memory.average, what).wait()
            bucket.settle()
            yield bucket

    def _wake(self, bucket: Bucket) -> BucketMemory | None:
        """Get a dormant bucket ready to be averaged."""
        if bucket.optimizer is None:
            bucket.optimizer = self._view(bucket)
        if self._context.group.world == 1:
            return None
        flat = torch.zeros(bucket.length, dtype=bucket.dtype, device=self._context.group.device)
        memory = BucketMemory(contribution=flat, average=flat)
        bucket.use(memory, private=bool(self._private), settle=self._settle)
        return memory

    def _view(self, bucket: Bucket) -> OptimizerView:
        return self._context.views.of([slot.parameter for slot in bucket.slots])

    def _bucket(self, number: int, members: tuple[int, ...], status_flags: int = 0) -> Bucket:
        context = self._context
        named: list[tuple[int, str, nn.Parameter]] = [
            (i, context.names[i], context.parameters[i]) for i in members
        ]
        return Bucket(number, named, world=context.group.world, status_flags=status_flags)
