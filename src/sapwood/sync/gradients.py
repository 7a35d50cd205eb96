"""What ``p.grad`` is in layer-wise mode: the average, to look at but not to change.

The weight is updated with the average before anybody can change it, so a change would be ignored.
It is noticed instead: by the version counter and, where ``.data`` or ``.numpy()`` goes around it,
by comparing with a copy, which is taken only if one of them is used. Looking at a gradient whose
average is still on its way waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from sapwood.errors import UsageError
from sapwood.sync.guard import in_backward
from sapwood.sync.nested import tensors_in

__all__ = [
    "TOO_EARLY",
    "AveragedGradient",
    "as_plain",
    "changed_behind",
    "forget",
    "present_as",
]

_off = torch._C.DisableTorchFunctionSubclass
# Ways to the memory that version counters do not see; the last is GradScaler.unscale_().
_ALIASES = (
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.__array__,
    Tensor.__dlpack__,
    torch._amp_foreach_non_finite_check_and_unscale_,
)
_GETTERS = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_sparse")
# What can be asked while the values are still on their way.
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size),
}
TOO_EARLY = (
    "p.grad is looked at during back-propagation, when this gradient has been handed over for "
    "averaging; look at it in a hook of the parameter itself, registered before the forward "
    "(p.register_post_accumulate_grad_hook), or after backward()"
)


class AveragedGradient(Tensor):
    """A gradient that belongs to the engine; results of operations on it are plain tensors."""

    _settle: Callable[[], None] | None = None
    """Waits until the average is there."""
    _before: Tensor | None = None
    """The values when such an alias was first taken."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the average, then do what was asked."""
        if function not in _HARMLESS:
            for gradient in tensors_in((args, kwargs)):
                if isinstance(gradient, AveragedGradient):
                    gradient._looked_at(alias=_is_alias(function))
        with _off():
            return function(*args, **(kwargs or {}))

    def _looked_at(self, *, alias: bool) -> None:
        if self._settle is not None:
            if in_backward():  # the average may need what is still to come
                raise UsageError(TOO_EARLY)
            self._settle()
        if alias and self._before is None:
            with _off():
                self._before = self.clone(memory_format=torch.contiguous_format)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor of its own."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor: what is saved does not belong to the engine."""
        plain: Any = self.clone()
        return plain.__reduce_ex__(protocol)


def _is_alias(function: Any) -> bool:
    # An operator called by its own name (torch.ops...) may write, and says so to nobody.
    return function in _ALIASES or isinstance(function, (OpOverload, OpOverloadPacket))


def present_as(gradient: Tensor, settle: Callable[[], None] | None) -> Tensor:
    """Turn ``gradient`` into one that belongs to the engine, in place."""
    gradient.__class__ = AveragedGradient
    gradient._settle = settle  # type: ignore[attr-defined]
    return gradient


def as_plain(gradient: Tensor | None) -> Tensor | None:
    """Give a gradient up that belonged to the engine, in place: it may be changed from now on."""
    if isinstance(gradient, AveragedGradient):
        gradient._settle = gradient._before = None
        gradient.__class__ = Tensor  # type: ignore[assignment]
    return gradient


def changed_behind(gradient: Tensor | None) -> bool:
    """Whether the values were changed through an alias."""
    before = getattr(gradient, "_before", None)
    if before is None or gradient is None:
        return False
    with _off():
        now = gradient.contiguous()
        # As bytes: a NaN that stayed is no change.
        return not torch.equal(now.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))


def forget(gradient: Tensor | None) -> None:
    """Drop the copy."""
    if getattr(gradient, "_before", None) is not None:
        gradient._before = None  # type: ignore[union-attr]
