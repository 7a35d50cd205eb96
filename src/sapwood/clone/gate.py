"""A clone's first forward pass, begun while the last layers still arrive.

Whatever a module reads has arrived before it is read. When the first pass through the whole model
is over, everything is there, verified on every clone, and the hooks go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sapwood.clone.arrival import Arrival
from sapwood.clone.plan import Key
from sapwood.state.metadata import METADATA
from sapwood.state.tensors import named_buffers, named_parameters, unwrap

__all__ = ["Gate"]


class Gate:
    """Hooks on a model whose tensors are still arriving.

    A module's own tensors are not all it reads: it may take the weight of another one that it never
    calls (attention its projection's, a list of parameters, a method of a part), or have the
    second name of a tied one. So inside the outermost call of a module every operation waits for
    its arguments. A module's own are waited for besides: ``torch.func`` wraps arguments where no
    mode sees them.
    """

    def __init__(
        self, model: nn.Module, arrival: Arrival, finish: Callable[[], None], timeout: float
    ) -> None:
        """``finish`` is called once, at the end of the first forward pass."""
        self._arrival, self._finish, self._timeout = arrival, finish, timeout
        self._root = unwrap(model)
        self._coming = _by_memory(self._root, arrival)
        self._mode = _Waiting(self)
        self._depth = 0
        self._over = False
        self._handles: list[Any] = []
        for module in self._root.modules():
            before = module.register_forward_pre_hook(self._enter, prepend=True)
            after = module.register_forward_hook(self._leave, always_call=True)
            self._handles += [before, after]

    def wait_for(self, tensors: Iterable[Tensor | None]) -> None:
        """Wait until these, and whatever shares memory with them, are complete."""
        if self._over:
            return
        for tensor in tensors:
            keys = None if tensor is None else self._coming.get(_memory(tensor))
            if keys:
                self._arrival.wait(keys, self._timeout)

    def remove(self) -> None:
        """Take the hooks away; calling it again does nothing."""
        self._over = True
        # Inside a forward pass the mode must be left where it was entered: by the hooks.
        while self._handles and not self._depth:
            self._handles.pop().remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        self.wait_for(chain(module._parameters.values(), module._buffers.values()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._depth == 0:
            return  # the hooks came in the middle of a call
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._over:
            self.remove()
        elif module is self._root and output is not None:  # None also after an exception
            self._finish()


class _Waiting(TorchFunctionMode):
    """Every operation waits for its arguments."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in METADATA:  # an engine looks at all parameters before each forward pass
            self._gate.wait_for(_tensors_in((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _by_memory(model: nn.Module, arrival: Arrival) -> dict[int, list[Key]]:
    """What is still to come, by the memory in which it lies."""
    found: dict[int, list[Key]] = {}
    for name, tensor in (*named_parameters(model).items(), *named_buffers(model).items()):
        if ("model", name) in arrival.memory and tensor.numel():
            found.setdefault(_memory(tensor), []).append(("model", name))
    return found


def _memory(tensor: Tensor) -> int:
    """Tells the memory of a tensor, which views and aliases have in common; 0: it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, on the meta device, inside torch.func
        return 0


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)
