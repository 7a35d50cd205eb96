"""Gradients fused into one piece of memory, with flags that say who had one.

Layout of a bucket's memory: ``gradient | gradient | ... | flag per gradient | status flags``.
Each rank writes 1 or 0 into the flags; after the sum, a flag of 0 means no rank had that gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sapwood.errors import UsageError
from sapwood.sync.optim import OptimizerView
from sapwood.sync.updates import Ready

__all__ = ["Bucket", "Slot"]


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = ("bucket", "filled", "index", "name", "parameter", "view")

    def __init__(self, index: int, name: str, parameter: nn.Parameter, bucket: Bucket) -> None:
        """``index`` is the parameter's place in registration order."""
        self.index = index
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.view: Tensor | None = None
        self.filled = False


class Bucket:
    """Some parameters, averaged and updated together. With one rank there is nothing to fuse."""

    def __init__(
        self,
        number: int,
        members: Sequence[tuple[int, str, nn.Parameter]],
        *,
        world: int,
        device: torch.device,
        status_flags: int = 0,
    ) -> None:
        """``status_flags`` extra flags travel with the last bucket of a plan."""
        self.number = number
        self.slots = [Slot(index, name, p, self) for index, name, p in members]
        self.world = world
        self.device = device
        self.status_flags = status_flags
        self.missing = len(self.slots)
        self.present: list[Slot] = []
        """After the average: the slots some rank had a gradient for."""
        self.optimizer: OptimizerView | None = None
        self.flat: Tensor | None = None
        self._flags: Tensor | None = None
        self.status: list[float] = []
        self._versions: list[int] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(slot.name for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return 0 if self.flat is None else self.flat.numel() * self.flat.element_size()

    def allocate(self) -> None:
        """Get the memory, once; gradients are then views of it."""
        if self.world == 1 or self.flat is not None:
            return
        dtype = self.slots[0].parameter.dtype if self.slots else torch.float32
        sizes = [slot.parameter.numel() for slot in self.slots]
        total = sum(sizes)
        length = total + len(self.slots) + self.status_flags
        self.flat = torch.zeros(length, dtype=dtype, device=self.device)
        self._flags = self.flat[total:]
        offset = 0
        for slot, size in zip(self.slots, sizes, strict=True):
            slot.view = _like(self.flat, offset, slot.parameter)
            offset += size

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.missing = len(self.slots)
        self.present = []
        for slot in self.slots:
            slot.filled = False

    def fill(self, slot: Slot, gradient: Tensor) -> None:
        """Take a gradient that is ready, scaled so that the sum over ranks is the mean."""
        if gradient.is_sparse or gradient.requires_grad:
            raise UsageError(_unusable(slot, gradient))
        slot.filled = True
        self.missing -= 1
        if slot.view is not None:
            torch.mul(gradient, 1.0 / self.world, out=slot.view)
            slot.parameter.grad = slot.view

    def seal(self, status: Sequence[float] = ()) -> None:
        """Complete the memory before it is sent: zeros and a cleared flag where nothing came."""
        if self.flat is None or self._flags is None:
            self.status = list(status)
            return
        self._flags.fill_(1.0)
        if status:
            self._flags[len(self.slots) :] = torch.tensor(status, dtype=self.flat.dtype)
        for position, slot in enumerate(self.slots):
            if slot.filled or slot.view is None:
                continue
            if slot.parameter.grad is not None:  # left by an accumulating backward
                self.fill(slot, slot.parameter.grad)
            else:
                slot.view.zero_()
                self._flags[position] = 0.0

    def settle(self) -> list[Slot]:
        """After the sum: point every gradient at its average; the slots no rank had one for."""
        absent: list[Slot] = []
        flags = self._flags.tolist() if self._flags is not None else None
        for position, slot in enumerate(self.slots):
            here = flags[position] > 0 if flags else slot.parameter.grad is not None
            if not here:
                slot.parameter.grad = None
                absent.append(slot)
                continue
            if slot.view is not None:
                slot.parameter.grad = slot.view
            self.present.append(slot)
        if flags:
            self.status = flags[len(self.slots) :]
        return absent

    def ready(self) -> Ready | None:
        """What can be applied now; None if no rank had a gradient."""
        if not self.present or self.optimizer is None:
            return None
        return Ready(self.number, self.optimizer, [slot.index for slot in self.present])

    def note_versions(self) -> None:
        """Remember the gradients as they are, to see whether somebody changes them."""
        self._versions = self._read_versions()

    def touched(self) -> bool:
        """Whether somebody changed a gradient in place, or put another, since ``note_versions``."""
        if self._versions != self._read_versions():
            return True
        return any(
            slot.parameter.grad is not slot.view and slot.parameter.grad is not None
            for slot in self.present
            if slot.view is not None
        )

    def _read_versions(self) -> list[int]:
        if self.flat is not None:  # its views share one counter
            return [self.flat._version]
        gradients = (slot.parameter.grad for slot in self.slots)
        return [-1 if g is None else g._version for g in gradients]

    def clear(self) -> None:
        """Drop the gradients of this step."""
        for slot in self.slots:
            slot.parameter.grad = None


def _like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A part of ``flat`` with the shape and, where it is dense, the layout of ``parameter``."""
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    if dense:
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _unusable(slot: Slot, gradient: Tensor) -> str:
    if gradient.is_sparse:
        return (
            f"the gradient of {slot.name} is sparse, which cannot be fused into a bucket; "
            "make the embedding with sparse=False"
        )
    return (
        f"the gradient of {slot.name} has a graph of its own (backward with create_graph=True), "
        "which in-place averaging would break; use torch.autograd.grad for the inner derivative"
    )
