"""Buffers that forward changes: rank 0's values for everybody, and an event when they are final."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.events import BuffersUpdated
from sapwood.runtime.group import Pending
from sapwood.state import named_buffers
from sapwood.sync.base import Context

__all__ = ["BufferSync"]


class BufferSync:
    """Broadcasts all buffers as one message of bytes, and takes over those of training modules.

    The broadcast runs beside back-propagation, once a step, at a fixed place in the sequence of
    collectives and always of the same size, so that ranks cannot come to differ on it.
    """

    def __init__(self, context: Context, *, local: bool = False) -> None:
        """``local``: only announce; somebody else sees to it that ranks agree."""
        self._context = context
        self._all = named_buffers(context.model)
        self._bytes: Tensor | None = None
        shared = context.group.world > 1 and context.settings.broadcast_buffers and not local
        if self._all and shared:
            size = sum(b.numel() * b.element_size() for b in self._all.values())
            self._bytes = torch.empty(size, dtype=torch.uint8, device=context.group.device)

    def announce_local(self, step: int) -> None:
        """With nobody to agree with, buffers are final at the end of forward."""
        if self._bytes is None:
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
        if self._bytes is None:
            return None
        if self._context.group.rank == 0:
            torch.cat([_as_bytes(b) for b in self._all.values()], out=self._bytes)
        return self._context.group.broadcast(self._bytes, "sending rank 0's buffers")

    def arrived(self, step: int) -> None:
        """Take over what came and announce it."""
        assert self._bytes is not None
        if self._context.group.rank != 0:
            training = named_buffers(self._context.model, training_only=True)
            offset = 0
            for name, buffer in self._all.items():
                size = buffer.numel() * buffer.element_size()
                if name in training:
                    part = self._bytes[offset : offset + size].clone().view(buffer.dtype)
                    # Through .data: autograd saved it, but does not read it in training mode.
                    buffer.data.copy_(part.view(buffer.shape))
                offset += size
        self._announce(step)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
