"""The two hooks torch offers: functions as the user's code calls them, and operations below."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.state.graph.configure import function_layer, functional
from sapwood.state.graph.marks import Mark, tensors_in
from sapwood.state.graph.sample import map_tensors

if TYPE_CHECKING:
    from sapwood.state.graph.traced import Tracer

__all__ = ["FunctionMode", "OperationMode"]

_CREATES = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_empty_strided new_zeros new_ones new_full"
)
_CREATING = frozenset(_CREATES.split())
_READS = (
    "tolist numpy item __array__ __dlpack__ __bool__ __int__ __float__ __complex__ __index__ "
    "data_ptr"
)
_READING = frozenset(_READS.split())


class FunctionMode(TorchFunctionMode):
    """Sees functional forms of layers, and reads of values that are no operations."""

    def __init__(self, tracer: Tracer) -> None:
        """Tell ``tracer``."""
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READING and args and isinstance(args[0], Tensor):
            mark = self._tracer.marks.get(args[0])
            if mark is None or mark.values:
                self._tracer.read()
        layer = None if self._tracer.frame is not None else function_layer(name)
        if layer is None:
            return func(*args, **kwargs)
        return self._tracer.function(functional(layer), func, args, kwargs)


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on tensors."""

    def __init__(self, tracer: Tracer) -> None:
        """Tell ``tracer``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and mark what it makes."""
        kwargs = kwargs or {}
        marks = self._tracer.marks
        given = list(tensors_in((args, kwargs)))
        places = _written(func)
        written = [t for p in places for t in tensors_in(_argument(p, args, kwargs))]
        to_meta = any(t.device.type == "meta" for t in given)
        ids = {id(t) for p in _hidden(func) for t in tensors_in(_argument(p, args, kwargs))}
        ids |= {id(t) for t in written}
        changed = {
            id(t): new
            for t in given
            if (new := marks.replacement(t, to_meta=to_meta, written=id(t) in ids)) is not t
        }
        if changed:
            args, kwargs = map_tensors((args, kwargs), lambda t: changed.get(id(t), t))
            given = [changed.get(id(t), t) for t in given]
            written = [changed.get(id(t), t) for t in written]
        found = [marks.get(t) for t in given]
        known = [m for m in found if m is not None]
        # What has no mark was not made here: nobody knows what its values follow from.
        if any(m is None or m.values for m in found) and _reads(func, args):
            self._tracer.read()
        out = func(*args, **kwargs)
        marks.tick()
        if func._schema.name.rpartition("::")[2] in _CREATING:
            known = []  # only a shape was looked at
        mark = self._tracer.combine(known)
        inside = {id(t) for t in written}
        for tensor in tensors_in(out):
            if id(tensor) not in inside:
                marks.set(tensor, Mark(mark.origin, mark.weights, mark.values))
        for tensor in written:
            marks.written(tensor, Mark(mark.origin, mark.weights, mark.values))
        return out


@lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments an operation writes to."""
    return tuple(
        (n, argument.name)
        for n, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@lru_cache(maxsize=4096)
def _hidden(func: Any) -> tuple[tuple[int, str], ...]:
    """Arguments that batch norm writes to without saying so: the user's must not change."""
    return tuple(
        (n, argument.name)
        for n, argument in enumerate(func._schema.arguments)
        if "batch_norm" in func._schema.name and argument.name in ("running_mean", "running_var")
    )


def _argument(place: tuple[int, str], args: Any, kwargs: Any) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


@lru_cache(maxsize=4096)
def _looks(func: Any) -> bool:
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _reads(func: Any, args: Any) -> bool:
    """Whether what the forward sees of the result (a number, a shape) depends on values."""
    if not _looks(func):
        return False
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return True
