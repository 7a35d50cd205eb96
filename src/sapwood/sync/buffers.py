"""Buffers that forward changes: rank 0's values for everybody, and an event when they are final."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import torch
from torch import Tensor

from sapwood.events import BuffersUpdated
from sapwood.runtime.group import Pending
from sapwood.state.tensors import named_buffers
from sapwood.sync.base import Context

__all__ = ["BufferSync"]

_ALIGNED = 16  # bytes: the widest element there is


class BufferSync:
    """Broadcasts all buffers as one message of bytes, and takes over those of training modules.

    The broadcast runs beside back-propagation, once a step, at a fixed place in the sequence of
    collectives and always of the same size, so that ranks cannot come to differ on it.
    """

    def __init__(self, context: Context, *, local: bool = False) -> None:
        """``local``: only announce; somebody else sees to it that ranks agree."""
        self._context = context
        self._message: _Message | None = None
        buffers = named_buffers(context.model)
        shared = context.group.world > 1 and context.settings.broadcast_buffers and not local
        if buffers and shared:
            self._message = _Message(buffers, context.group.device)

    def announce_local(self, step: int) -> None:
        """With nobody to agree with, buffers are final at the end of forward."""
        if self._message is None:
            self._announce(step)

    def _announce(self, step: int) -> None:
        events = self._context.events
        if not events.wants(BuffersUpdated):
            return
        buffers = named_buffers(self._context.model, training_only=True)
        if buffers:
            events.publish(BuffersUpdated(step=step, buffers=buffers))

    def launch(self) -> Pending | None:
        """Start sending; None when there is nothing to send."""
        if self._message is None:
            return None
        if self._context.group.rank == 0:
            self._message.write()
        return self._context.group.broadcast(self._message.memory, "sending rank 0's buffers")

    def arrived(self, step: int) -> None:
        """Take over what came and announce it."""
        assert self._message is not None
        if self._context.group.rank != 0:
            training = named_buffers(self._context.model, training_only=True)
            self._message.read(training.keys())
        self._announce(step)


class _Message:
    """One piece of memory with a place for each buffer, in which buffers keep their dtype."""

    def __init__(self, buffers: dict[str, Tensor], device: torch.device) -> None:
        sizes = [b.numel() * b.element_size() for b in buffers.values()]
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        self.memory = torch.zeros(starts.pop(), dtype=torch.uint8, device=device)
        self._buffers = buffers
        self._places = {
            name: self.memory[start : start + size].view(b.dtype).view(b.shape)
            for (name, b), start, size in zip(buffers.items(), starts, sizes, strict=True)
        }

    def write(self) -> None:
        """Copy every buffer into its place."""
        # Through .data: autograd saved buffers, but does not read them in training mode.
        sources = [b.data for b in self._buffers.values()]
        torch._foreach_copy_(list(self._places.values()), sources)

    def read(self, wanted: Collection[str]) -> None:
        """Copy the wanted buffers from their places."""
        names = [name for name in self._buffers if name in wanted]
        targets = [self._buffers[name].data for name in names]
        torch._foreach_copy_(targets, [self._places[name] for name in names])
