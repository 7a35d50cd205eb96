"""What a trace knows of each tensor: where it came from.

A mark is an attribute of the tensor object, so it lives as long as the tensor. Writes in place are
also kept by storage, for views that were made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sapwood.state.graph.borrow import Borrowed
from sapwood.state.graph.builder import GraphBuilder, Origin

__all__ = ["Mark", "Marks", "tensors_in"]

_NAME = "_sapwood_mark"


@dataclass(slots=True)
class Mark:
    """What is known of a tensor."""

    origin: Origin | None = None
    """The layers it was made from; None for constants and for what only weights went into."""
    weights: tuple[int, ...] = ()
    """The model's tensors it was made from, until an activation goes in."""
    values: bool = False
    """Whether its values depend on the sample or on weights."""
    clock: int = field(default=-1)
    """When it was set."""


class Marks:
    """The marks of one trace."""

    def __init__(self, borrowed: Borrowed, builder: GraphBuilder) -> None:
        """``borrowed`` has the stand-ins of the model's tensors."""
        self.clock = 0
        self._borrowed, self._builder = borrowed, builder
        self._writes: dict[StorageWeakRef, list[Mark]] = {}
        self._others: dict[int, tuple[Tensor, Tensor]] = {}

    def weight(self, original: int) -> None:
        """Mark the stand-in of one of the model's tensors."""
        self.set(self._borrowed.stand_ins[original], Mark(weights=(original,), values=True))

    def views(self, weights: Container[int]) -> None:
        """Mark attributes that are views of the model's tensors."""
        for view, original in self._borrowed.views:
            if original in weights:
                self.set(view, Mark(weights=(original,), values=True))

    def set(self, tensor: Tensor, mark: Mark) -> None:
        """Say what a tensor is now."""
        mark.clock = self.clock
        setattr(tensor, _NAME, mark)

    def tick(self) -> None:
        """An operation begins."""
        self.clock += 1

    def get(self, tensor: Tensor) -> Mark | None:
        """What a tensor is, with what was written to its memory since; None if nobody set it."""
        mark: Mark | None = getattr(tensor, _NAME, None)
        if not self._writes:
            return mark
        since = -1 if mark is None else mark.clock
        later = [m for m in self._writes.get(_memory(tensor), ()) if m.clock > since]
        if not later:
            return mark
        every = [mark, *later] if mark is not None else later
        together = Mark(
            self._builder.union(m.origin for m in every if m.origin is not None),
            tuple(dict.fromkeys(w for m in every for w in m.weights)),
            any(m.values for m in every),
        )
        self.set(tensor, together)
        return together

    def written(self, tensor: Tensor, mark: Mark) -> None:
        """A tensor was written to: all that see its memory now come from there, too."""
        self.set(tensor, mark)
        key = _memory(tensor)
        if key is not None and (mark.origin is not None or mark.weights):
            self._writes.setdefault(key, []).append(mark)

    def replacement(self, tensor: Tensor, *, to_meta: bool, written: bool) -> Tensor:
        """What an operation gets instead of a tensor that is the user's, or on another device."""
        model = self._borrowed.stand_ins.get(id(tensor))
        if model is not None:
            return model
        if written and not hasattr(tensor, _NAME) and id(tensor) not in self._others:
            self._replace(tensor, tensor.detach().clone())  # the user's: it must not change
        while id(tensor) in self._others:
            tensor = self._others[id(tensor)][1]
        if to_meta and tensor.device.type != "meta" and tensor.dim() > 0:
            return self._replace(tensor, torch.empty_like(tensor, device="meta"))
        return tensor

    def _replace(self, tensor: Tensor, made: Tensor) -> Tensor:
        self.set(made, self.get(tensor) or Mark())
        self._others[id(tensor)] = (tensor, made)
        return made


def _memory(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a result or an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name, None))
