"""Gradients fused into one piece of memory, with flags that say who had one.

Layout of a bucket's memory: ``gradient | gradient | ... | flag per gradient | status flags``.
Each rank writes 1 or 0 into the flags; after the sum, a flag of 0 means no rank had that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sapwood.errors import UsageError
from sapwood.sync.averaging import BucketMemory
from sapwood.sync.gradients import as_plain, changed_behind, forget, present_as
from sapwood.sync.optim import OptimizerView
from sapwood.sync.refusals import sparse
from sapwood.sync.updates import Ready

__all__ = ["Bucket", "Slot"]


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = (
        *("bucket", "filled", "given", "gradient", "handed", "index"),
        *("name", "parameter", "place", "taken"),
    )

    def __init__(self, index: int, name: str, parameter: nn.Parameter, bucket: Bucket) -> None:
        """``index`` is the parameter's place in registration order."""
        self.index = index
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.given: Tensor | None = None
        """The place of this rank's gradient in the contribution."""
        self.gradient: Tensor | None = None
        """What ``p.grad`` is once the bucket was launched: the place of the average."""
        self.place = 0
        """The address of ``gradient``: assigning to ``p.grad.data`` moves it elsewhere."""
        self.filled = False
        """Its hook was called in this backward."""
        self.taken = False
        """``given`` holds this step's gradient."""
        self.handed = False
        """``gradient`` is a rank's own, and its average is on its way."""


class Bucket:
    """Some parameters, averaged and updated together. With one rank there is nothing to fuse."""

    def __init__(
        self,
        number: int,
        members: Sequence[tuple[int, str, nn.Parameter]],
        *,
        world: int,
        status_flags: int = 0,
    ) -> None:
        """``status_flags`` extra flags travel with the last bucket of a plan."""
        self.number = number
        self.slots = [Slot(index, name, p, self) for index, name, p in members]
        self.indices = [slot.index for slot in self.slots]
        self.status_flags = status_flags
        self.missing = len(self.slots)
        self.present: list[Slot] = []
        """After the average: the slots some rank had a gradient for."""
        self.optimizer: OptimizerView | None = None
        self.status: list[float] = []
        self._scale = 1.0 / world
        self._memory: BucketMemory | None = None
        self._private = True
        self._complete = False
        """Whether this rank had every gradient, so that ``p.grad`` points at each average."""
        self._settle: Callable[[], None] | None = None
        self._flags: Tensor | None = None
        self._summed_flags: Tensor | None = None
        self._versions: list[int] = []
        self._weights: list[int] = []
        self._shown: list[tuple[Tensor | None, int]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(slot.name for slot in self.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Of its memory: complex gradients travel as pairs of real numbers."""
        return self.slots[0].parameter.dtype.to_real() if self.slots else torch.float32

    @property
    def length(self) -> int:
        """Elements that travel, flags included."""
        return self._end() + len(self.slots) + self.status_flags

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return 0 if self._memory is None else self.length * self.dtype.itemsize

    def use(self, memory: BucketMemory, *, private: bool, settle: Callable[[], None]) -> None:
        """Work in this memory.

        Args:
            memory: where gradients go in, and where their average comes out.
            private: ``p.grad`` is this rank's own copy of the average, which may be changed; else
                it is the average itself, which other ranks may read.
            settle: waits for the average, when somebody looks at it.
        """
        self._memory = memory
        self._private = private
        end = self._end()
        self._flags = memory.contribution[end:]
        self._summed_flags = memory.average[end:]
        self._settle = settle
        for slot, offset in zip(self.slots, self._offsets(), strict=True):
            slot.given = _like(memory.contribution, offset, slot.parameter)
            self._show(slot, offset)

    def _show(self, slot: Slot, offset: int) -> None:
        """Make what ``p.grad`` will be."""
        assert self._memory is not None
        shown = self._memory.contribution if self._private else self._memory.average
        slot.gradient = _like(shown, offset, slot.parameter)
        slot.place = slot.gradient.data_ptr()
        if not self._private:
            present_as(slot.gradient, self._settle)

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.missing = len(self.slots)
        self.present = []
        for slot in self.slots:
            slot.filled = slot.taken = slot.handed = False

    def take(self, slot: Slot) -> None:
        """Take a gradient that is complete, while it is in the cache.

        Its memory is free for the next layer's gradient at once: if all of a bucket's were freed
        together, they would go back to the system, and every page be faulted in again. Not where
        ``p.grad`` is private: there, hooks of other layers may still want to see it.
        """
        gradient = slot.parameter.grad
        if self._memory is None or self._private or gradient is None:
            return
        if gradient is slot.gradient:
            raise UsageError(
                f"p.grad of {slot.name} was kept from an earlier step and put back, but its memory "
                "belongs to the engine; keep p.grad.clone()"
            )
        self._give(slot, gradient)

    def _give(self, slot: Slot, gradient: Tensor) -> None:
        assert slot.given is not None
        _check_usable(slot, gradient)
        torch.mul(gradient, self._scale, out=slot.given)
        slot.taken = True
        slot.parameter.grad = slot.gradient
        if self._private:
            # Not for hooks of other layers to look at: it is a share of the average, or half it.
            slot.handed = True
            assert slot.gradient is not None
            present_as(slot.gradient, self._settle)

    def seal(self, status: Sequence[float] = ()) -> None:
        """Take this rank's gradients, scaled so that the sum over ranks is the mean.

        Zeros and a cleared flag stand where nothing came.
        """
        if self._memory is None or self._flags is None:
            self._seal_alone(status)
            return
        self._flags.fill_(1.0)
        if status:
            self._flags[len(self.slots) :] = torch.tensor(status, dtype=self.dtype)
        self._complete = True
        for position, slot in enumerate(self.slots):
            assert slot.given is not None
            # Also what an accumulating backward left, which had no hook in this one.
            gradient = slot.parameter.grad
            if gradient is None:
                slot.given.zero_()
                self._flags[position] = 0.0
                self._complete = False
            elif not slot.taken or gradient is not slot.gradient:
                self._give(slot, gradient)

    def _seal_alone(self, status: Sequence[float]) -> None:
        self.status = list(status)
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                _check_usable(slot, gradient)
                slot.place = gradient.data_ptr()
                slot.gradient = gradient if self._private else present_as(gradient, None)

    def alone(self, *, private: bool) -> None:
        """Work on one rank, in the memory autograd makes; ``private`` as in ``use``."""
        self._private = private

    @property
    def complete(self) -> bool:
        """Whether this rank had a gradient for every parameter."""
        return self._complete or self._memory is None

    def settle(self, *, show: bool = True) -> list[Slot]:
        """After the sum: point every gradient at its average; the slots no rank had one for.

        Without ``show`` that is left to a call of ``show``, when back-propagation has ended.
        """
        if self._memory is None or self._summed_flags is None:
            self.present = [s for s in self.slots if s.parameter.grad is not None]
            return [s for s in self.slots if s.parameter.grad is None]
        flags = self._summed_flags.tolist()
        self.status = flags[len(self.slots) :]
        if self._private and self._memory.shared:
            self._memory.contribution.copy_(self._memory.average)
            self._versions = self._read_versions()
        if self._complete and all(flag > 0 for flag in flags[: len(self.slots)]):
            self.present, absent = self.slots, []
        else:
            pairs = list(zip(flags, self.slots, strict=False))
            self.present = [slot for flag, slot in pairs if flag > 0]
            absent = [slot for flag, slot in pairs if flag <= 0]
        if show:
            self.show()
        return absent

    def show(self) -> None:
        """Point the gradients at their averages, if that was not done yet."""
        if self._memory is None or (self.present is self.slots and not self._private):
            return
        for slot in self.present:
            if slot.handed:
                slot.handed = False
                slot.gradient = as_plain(slot.gradient)
            elif not slot.taken and slot.parameter.grad is None:
                # What the user has set since stays, to be noticed: ``seal`` left None there.
                slot.parameter.grad = slot.gradient

    def ready(self) -> Ready | None:
        """What can be applied now; None if no rank had a gradient."""
        if not self.present or self.optimizer is None:
            return None
        whole = self.present is self.slots
        indices = self.indices if whole else [slot.index for slot in self.present]
        return Ready(self.number, self.optimizer, indices)

    def look_again(self) -> None:
        """Before a late update: also what the user gave a gradient that no rank had one for."""
        if self.present is not self.slots:
            self.present = [slot for slot in self.slots if slot.parameter.grad is not None]

    def note_shown(self) -> None:
        """After the update: remember private gradients, which the optimizer may have written."""
        self._shown = [(s.parameter.grad, _version(s.parameter.grad)) for s in self.slots]

    def shown_changed(self) -> bool:
        """Whether somebody changed a private gradient, or put another, since ``note_shown``."""
        return any(
            slot.parameter.grad is not gradient or _version(gradient) != version
            for slot, (gradient, version) in zip(self.slots, self._shown, strict=False)
        )

    def note_versions(self) -> None:
        """Remember gradients and weights as they are, to see whether somebody changes them."""
        self._versions = self._read_versions()
        self._weights = [slot.parameter._version for slot in self.slots]

    def moved(self) -> str | None:
        """The name of a weight that somebody changed since ``note_versions``."""
        for slot, version in zip(self.slots, self._weights, strict=True):
            if slot.parameter._version != version:
                return slot.name
        return None

    def written(self) -> bool:
        """Whether somebody changed a gradient in place since ``note_versions``."""
        return bool(self.present) and self._versions != self._read_versions()

    def touched(self) -> bool:
        """Whether somebody changed a gradient in any way, or put another, since then."""
        if self.written():
            return True
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.present:
                gradient = slot.parameter.grad
                if gradient is None or gradient is not slot.gradient:
                    return True
                if gradient.data_ptr() != slot.place or changed_behind(gradient):
                    return True
        if self.present is self.slots:
            return False
        present = {slot.index for slot in self.present}
        return any(s.parameter.grad is not None for s in self.slots if s.index not in present)

    def meddled(self) -> bool:
        """Whether somebody changed a private gradient that was handed over, or put another."""
        if not self._private or not self._versions:
            return False
        if any(slot.handed and slot.parameter.grad is not slot.gradient for slot in self.slots):
            return True
        return self._versions != self._read_versions()

    def _read_versions(self) -> list[int]:
        if self._memory is not None:  # its views share one counter
            shown = self._memory.contribution if self._private else self._memory.average
            return [shown._version]
        return [_version(slot.parameter.grad) for slot in self.slots]

    def clear(self) -> None:
        """Drop the gradients of this step."""
        with torch._C.DisableTorchFunctionSubclass():
            for position, slot in enumerate(self.slots):
                slot.parameter.grad = None
                if self._memory is None:
                    slot.gradient = None
                elif slot.gradient is not None and slot.gradient.data_ptr() != slot.place:
                    self._show(slot, self._offsets()[position])  # somebody assigned to its .data
                else:
                    forget(slot.gradient)
        self._shown, self._versions = [], []

    def release(self) -> None:
        """Let go of the memory; see ``BucketSet.release``. The bucket is of no use after it."""
        if self._memory is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                gradient = slot.parameter.grad
                if gradient is not None and gradient is slot.gradient:
                    slot.parameter.grad = gradient.clone()
                # Slots and buckets refer to each other: the collector alone would end them.
                slot.given = slot.gradient = None
        self._memory = self._flags = self._summed_flags = self._settle = None

    def _offsets(self) -> list[int]:
        found, offset = [], 0
        for slot in self.slots:
            if slot.parameter.is_complex():
                offset += offset % 2  # a complex number begins at an even place
            found.append(offset)
            offset += _elements(slot.parameter)
        return found

    def _end(self) -> int:
        if not self.slots:
            return 0
        return self._offsets()[-1] + _elements(self.slots[-1].parameter)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _elements(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A part of ``flat`` with the shape and, where it is dense, the strides of ``parameter``.

    Autograd gives gradients the strides of a dense parameter, and fused kernels rely on it.
    """
    part = flat[offset : offset + _elements(parameter)]
    if parameter.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    if _dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def _dense(parameter: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in whatever order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _check_usable(slot: Slot, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise UsageError(sparse(slot.name))
    if gradient.requires_grad:
        raise UsageError(
            f"the gradient of {slot.name} has a graph of its own (backward with "
            "create_graph=True), which in-place averaging would break; use torch.autograd.grad "
            "for the inner derivative"
        )
