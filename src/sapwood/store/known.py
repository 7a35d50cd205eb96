"""What the state of a module looks like, remembered: a second save does not walk its modules.

A module is used again only while it is proven to be as it was: the same modules, tensors, shapes,
names and hooks. What cannot be proven is walked each time, as if it were new.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from sapwood.state.graph.snapshot import Snapshot, Unknowable
from sapwood.state.tensors import clean_name, unwrap
from sapwood.store.tree import Parts, take_apart

__all__ = ["KnownStates"]

_MODELS = 8
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_FACTS = tuple(map(attrgetter, ("requires_grad", "is_leaf", "device", "layout")))
_pointer = Tensor.data_ptr
Place = tuple[dict[str, Tensor | None], str]


class KnownStates:
    """The states of modules, of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        """Start empty."""
        self.hits = 0
        """How many modules did not have to be walked."""
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def take_apart(self, model: nn.Module) -> Parts:
        """As ``tree.take_apart``.

        Raises:
            StoreError: as there.
        """
        inner = unwrap(model)
        with self._lock:
            known = self._known.get(id(inner))
            parts = known.parts(inner) if known is not None else None
            if parts is not None:
                self.hits += 1
                return parts
            self._known.pop(id(inner), None)
        parts = take_apart(model)
        self._remember(inner, parts)
        return parts

    def _remember(self, model: nn.Module, parts: Parts) -> None:
        number = id(model)
        try:
            known = _Known(model, parts, lambda ref: self._died(number, ref))
        except Unknowable:
            return
        with self._lock:
            while len(self._known) >= _MODELS:
                self._known.popitem(last=False)
            self._known[number] = known

    def _died(self, number: int, ref: Any) -> None:
        # No lock: a collection may run this at any point of a thread that holds it.
        known = self._known.get(number)
        if known is not None and known.model is ref:
            self._known.pop(number, None)


class _Known:
    """The state of one module object when it was walked."""

    def __init__(self, model: nn.Module, parts: Parts, forget: Any) -> None:
        """Raises ``Unknowable`` if its state follows from more than its modules and tensors."""
        self.model = weakref.ref(model, forget)
        self._dicts = [vars(module) for module in model.modules()]
        if not all(map(_is_plain, model.modules())) or not self._no_hooks():
            raise Unknowable
        self._snapshot = Snapshot(model)
        places = dict(_places(model))
        if places.keys() != {name for name, _ in parts.names}:
            raise Unknowable
        first = {number: name for name, number in reversed(parts.names)}
        self._places = [places[first[number]] for number in range(len(parts.tensors))]
        self._others = [
            (places[name], number) for name, number in parts.names if first[number] != name
        ]
        self._names, self._structure, self._text = parts.names, parts.structure, parts.text
        tensors = self._tensors()
        same = list(map(_pointer, tensors)) == list(map(_pointer, parts.tensors))
        if not same or not _apart(tensors) or not self._tied(tensors):
            raise Unknowable
        self._facts = _facts(tensors)

    def parts(self, model: nn.Module) -> Parts | None:
        """What its state consists of now, None if it has to be walked."""
        if self.model() is not model or not self._no_hooks() or not self._snapshot.holds(model):
            return None
        tensors = self._tensors()
        if _facts(tensors) != self._facts or not _apart(tensors) or not self._tied(tensors):
            return None
        detached = tuple(tensor.detach() for tensor in tensors)
        return Parts(detached, self._names, self._structure, self._text)

    def _tensors(self) -> list[Tensor]:
        found = [held[name] for held, name in self._places]
        return [tensor for tensor in found if tensor is not None]

    def _tied(self, tensors: list[Tensor]) -> bool:
        """Whether further names of tensors still lead to the same objects."""
        return all(held.get(name) is tensors[n] for (held, name), n in self._others)

    def _no_hooks(self) -> bool:
        """Whether nothing but the modules' tensors makes the state dict."""
        return not any(
            any(map(held.get, _HOOKS)) or any(name in held for name in (*_METHODS, "_version"))
            for held in self._dicts
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether the class of a module leaves its state dict to torch."""
    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in _METHODS)


def _places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every tensor of the state by name, as the dictionary that holds it and the key there."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        begin = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield clean_name(begin + name), (module._parameters, name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(begin + name), (module._buffers, name)


def _facts(tensors: list[Tensor]) -> list[Any]:
    """What a tensor's entry says of it, beside what a snapshot compares."""
    return [list(map(type, tensors)), *(list(map(fact, tensors)) for fact in _FACTS)]


def _apart(tensors: list[Tensor]) -> bool:
    """Whether none of them may be the same memory as another one."""
    pointers = [pointer for pointer in map(_pointer, tensors) if pointer]
    return len(set(pointers)) == len(pointers)
