"""A clone's first forward pass, begun while the last layers still arrive.

Each module waits for its own tensors before it runs. When the first pass through the whole model is
over, everything is there, verified on every clone, and the hooks go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sapwood.clone.arrival import Arrival
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["Gate"]


class Gate:
    """Hooks on a model whose tensors are still arriving."""

    def __init__(
        self, model: nn.Module, arrival: Arrival, finish: Callable[[], None], timeout: float
    ) -> None:
        """``finish`` is called once, at the end of the first forward pass."""
        self._handles: list[Any] = []
        inner = unwrap(model)
        for prefix, module in inner.named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            own += [name for name, _ in module.named_buffers(recurse=False)]
            keys = [("model", clean_name(f"{prefix}.{name}" if prefix else name)) for name in own]
            known = [key for key in keys if key in arrival.memory]
            if known:
                hook = _waiter(arrival, known, timeout)
                self._handles.append(module.register_forward_pre_hook(hook))
        self._handles.append(inner.register_forward_hook(lambda *_: finish()))

    def remove(self) -> None:
        """Take the hooks away; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()


def _waiter(
    arrival: Arrival, keys: list[tuple[str, str]], timeout: float
) -> Callable[[nn.Module, Any], None]:
    def wait(module: nn.Module, args: Any) -> None:
        arrival.wait(keys, timeout)

    return wait
