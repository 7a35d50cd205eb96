"""Buffers that forward changes: rank 0's values for everybody, and an event when they are final."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from sapwood.events import BuffersUpdated
from sapwood.runtime.group import Pending
from sapwood.state.tensors import clean_name, unwrap
from sapwood.sync.base import Context

__all__ = ["BufferSync"]

_ALIGNED = 16  # bytes: the widest element there is


class BufferSync:
    """Broadcasts all buffers as one message of bytes.

    Rank 0 sends them when its back-propagation is over, since a recomputed segment changes its
    BatchNorm statistics once more; the others take them over when the step ends, since their
    back-propagation may still need the old ones. Once a step, at a fixed place in the sequence of
    collectives, and always all of them, so that ranks cannot come to differ on it.
    """

    def __init__(self, context: Context, *, local: bool = False) -> None:
        """``local``: only announce; somebody else sees to it that ranks agree."""
        self._context = context
        self._owners = _Owners(unwrap(context.model))
        self._message: _Message | None = None
        self._pending: Pending | None = None
        self._shared = context.group.world > 1 and context.settings.broadcast_buffers and not local

    def launch(self) -> None:
        """Start sending."""
        buffers = self._owners.tensors() if self._shared else {}
        if not any(buffer.numel() for buffer in buffers.values()):
            return
        if self._message is None or not self._message.fits(buffers):
            self._message = _Message(buffers, self._context.group.device)
        if self._context.group.rank == 0:
            self._message.write(buffers)
        self._pending = self._context.group.broadcast(
            self._message.memory, "sending rank 0's buffers"
        )

    def wait(self) -> None:
        """Wait until rank 0's values are here."""
        if self._pending is not None:
            self._pending.wait()

    def finish(self, step: int) -> None:
        """Take over what came, and announce it: nothing needs the old values any more."""
        pending, self._pending = self._pending, None
        wanted = self._context.events.wants(BuffersUpdated)
        if pending is None and not wanted:
            return
        buffers = self._owners.tensors()
        if pending is not None and self._message is not None and self._context.group.rank != 0:
            self._message.read(buffers)
        if buffers and wanted:
            self._context.events.publish(BuffersUpdated(step=step, buffers=buffers))


class _Owners:
    """The modules that have buffers. Asked for the tensors in each step: modules rebind them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._counts: list[int] = []
        self._places: list[tuple[str, nn.Module, str]] = []

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer once, by its name."""
        counts = [len(module._buffers) for _, module in self._modules]
        if counts != self._counts:  # a module has registered a new one
            self._counts = counts
            self._places = [
                (clean_name(f"{prefix}.{name}" if prefix else name), module, name)
                for prefix, module in self._modules
                for name in module._buffers
            ]
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for full, module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[full] = buffer
        return found


class _Message:
    """One piece of memory with a place for each buffer, in which buffers keep their dtype."""

    def __init__(self, buffers: dict[str, Tensor], device: torch.device) -> None:
        sizes = [b.numel() * b.element_size() for b in buffers.values()]
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        self.memory = torch.zeros(starts.pop(), dtype=torch.uint8, device=device)
        self._form = _form(buffers)
        self._places = [
            self.memory[start : start + size].view(b.dtype).view(b.shape)
            for b, start, size in zip(buffers.values(), starts, sizes, strict=True)
        ]

    def fits(self, buffers: dict[str, Tensor]) -> bool:
        """Whether it was made for buffers of these names, shapes and dtypes."""
        return self._form == _form(buffers)

    def write(self, buffers: dict[str, Tensor]) -> None:
        """Copy every buffer into its place."""
        torch._foreach_copy_(self._places, [b.data for b in buffers.values()])

    def read(self, buffers: dict[str, Tensor]) -> None:
        """Copy every buffer from its place; like forward's own changes, unknown to autograd."""
        pairs = [_writable(b.data, p) for b, p in zip(buffers.values(), self._places, strict=True)]
        torch._foreach_copy_([b for b, _ in pairs], [p for _, p in pairs])


def _writable(buffer: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """An expanded buffer has one element for many places, and can be written only once."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.size(dim) > 1:
            buffer, place = buffer.narrow(dim, 0, 1), place.narrow(dim, 0, 1)
    return buffer, place


def _form(buffers: dict[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, b.shape, b.dtype) for name, b in buffers.items()]
