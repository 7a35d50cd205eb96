"""Weights that back-propagation still reads after their own gradient is complete.

Autograd never needs a weight after its last gradient, unless the model used it behind autograd's
back (``weight.detach()``, ``weight.data``). Updating such a weight early would corrupt the gradient
of an earlier layer, silently so with fused optimizers, which do not move version counters. So the
first step is watched: updates are withheld, and every read of a saved weight is compared with
whether that weight's gradient is already complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedWeightWatch", "can_watch"]


def can_watch(model: nn.Module) -> bool:
    """Compiled code saves tensors its own way; there the hooks would only cause a recompilation."""
    return not any(
        type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None
        for m in model.modules()
    )


class SavedWeightWatch:
    """Watches one forward and its backward; ``late`` collects the parameters read too late."""

    def __init__(self, parameters: Sequence[nn.Parameter], complete: Callable[[int], bool]) -> None:
        """``complete(i)`` tells whether parameter ``i`` has its gradient."""
        self.late: set[int] = set()
        self._complete = complete
        self._owner = {p.untyped_storage().data_ptr(): i for i, p in enumerate(parameters)}
        self._hooks: saved_tensors_hooks | None = None

    def start(self) -> None:
        """Begin to watch what forward saves."""
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def stop(self) -> None:
        """Forward is over; reads during backward are still seen."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: Tensor) -> Any:
        index = self._owner.get(tensor.untyped_storage().data_ptr())
        return tensor if index is None else (tensor, index)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor, index = saved
        if self._complete(index):
            self.late.add(index)
        read: Tensor = tensor
        return read
