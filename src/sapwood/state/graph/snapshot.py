"""Proves that a module tree is as it was: its modules, tensors, shapes, attributes and code.

A check costs under a microsecond a layer, so it is done at every look-up of a cache, and nothing
has to be told to the cache. It is made of a few passes over flat lists, each in C.

It cannot see globals and closures that steer a forward, nor into objects that hide their state.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import isfunction, isroutine
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
from torch import Tensor, nn

from sapwood.state.graph.configure import constructor_defaults, is_leaf, real_class

__all__ = ["Snapshot", "Unknowable"]

_INTERNAL = frozenset(vars(nn.Module()))
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type)
_DEPTH, _NODES, _ARRAY = 8, 20_000, 1 << 16
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_NAMES = ("_modules", "_parameters", "_buffers")
_GETTERS = tuple(map(itemgetter, _NAMES))


class Unknowable(Exception):
    """A part of the state is too large or too deep to be compared."""


class Snapshot:
    """The state of a model when a graph of it was found.

    Holds its modules below the root, and tensors only by id, shape and dtype: another tensor at
    the same place with the same of these is as good.
    """

    def __init__(self, root: nn.Module) -> None:
        """Take it.

        Raises:
            Unknowable: it cannot be taken.
        """
        modules = list(root.modules())
        self._dicts = [vars(m) for m in modules]
        self._inside = [[d[name] for d in self._dicts] for name in _NAMES]
        children, parameters, buffers = self._inside
        self._listed = [d for d in children if d]
        self._held = [d for d in (*parameters, *buffers) if d]
        self._empty = [d for d in (*children, *parameters, *buffers) if not d]
        self._below = _values(self._listed)
        self._dicts_below = [None if m is None else vars(m) for m in self._below]
        self._classes = _classes(modules)
        self._kinds = list(map(type, self._below))
        self._root_kind = type(root)
        groups: dict[Any, list[dict[str, Any]]] = {}
        self._whole: list[dict[str, Any]] = []
        self._written: list[int] = []
        mutable: dict[int, Any] = {}
        for n, module in enumerate(modules):
            state = vars(module)
            if type(module).__module__.startswith("torch.nn.modules.") and is_leaf(module):
                groups.setdefault(_structure(module), []).append(state)
            else:
                self._whole.append(state)
            if _writes_itself(module):
                self._written.append(n)
            for name, value in state.items():
                if name not in _INTERNAL and not _fixed(value):
                    mutable[id(value)] = value
            if state["_buffers"]:
                held = state["_non_persistent_buffers_set"]
                mutable[id(held)] = held
        self._groups = [
            (states, itemgetter(*present) if present else None, absent)
            for (_, present, absent), states in groups.items()
        ]
        self._mutable = list(mutable.values())
        self._before = [dict(d) for d in self._whole]
        self._seen = self._look(root)

    def holds(self, root: nn.Module) -> bool:
        """Whether the model is still as it was."""
        try:
            return self._same_tree(root) and self._look(root) == self._seen
        except (Unknowable, KeyError, AttributeError, TypeError, ValueError, RuntimeError):
            return False  # tensors that were exchanged cannot be compared, attributes are gone

    def _same_tree(self, root: nn.Module) -> bool:
        """Whether it is the same modules, and the dictionaries looked at are still theirs."""
        if type(root) is not self._root_kind or root.__dict__ is not self._dicts[0]:
            return False
        below = _values(self._listed)
        return (
            len(below) == len(self._below)
            and all(map(is_, below, self._below))
            and all(map(is_, map(type, below), self._kinds))
            and all(map(is_, [None if m is None else m.__dict__ for m in below], self._dicts_below))
            and all(
                all(map(is_, map(get, self._dicts), inside))
                for get, inside in zip(_GETTERS, self._inside, strict=True)
            )
            and not any(self._empty)
            and all(map(_same, self._whole, self._before))
        )

    def _look(self, root: nn.Module) -> list[Any]:
        """All the rest that a graph follows from, as values to be compared."""
        tensors = [t for t in _values(self._held) if t is not None]
        seen: list[Any] = [
            list(chain.from_iterable(self._listed)),
            list(chain.from_iterable(self._held)),
            list(map(len, self._held)),
            list(map(len, self._listed)),
            list(map(id, tensors)),
            list(map(_shape, tensors)),
            list(map(_dtype, tensors)),
            [dict(vars(c)) for c in self._classes],
            _frozen(self._mutable),
        ]
        for states, present, absent in self._groups:
            seen.append(None if present is None else list(map(present, states)))
            seen += [[name in state for state in states] for name in absent]
        if self._written:
            modules = list(root.modules())
            seen.append([modules[n].extra_repr() for n in self._written])
        return seen


def _fixed(value: Any) -> bool:
    """Whether a value cannot change in itself: that it is the same object is enough."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    return isinstance(value, _ATOMS) or isfunction(value)


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a module's attributes are as before, whatever mode it is in."""
    if now == before:
        return True
    if now.get("training") is before.get("training"):
        return False
    before["training"] = now["training"]  # the next comparison is quick again
    return now == before


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    found = dict.fromkeys(base for m in modules for base in type(m).__mro__)
    return [cls for cls in found if cls not in (nn.Module, object)]


def _structure(module: nn.Module) -> tuple[type, tuple[str, ...], tuple[str, ...]]:
    names = sorted(constructor_defaults(real_class(module)))
    state = vars(module)
    present = tuple(n for n in names if n in state)
    absent = ("forward", *(n for n in names if n not in state))
    return type(module), present, absent


def _writes_itself(module: nn.Module) -> bool:
    return not (type(module).extra_repr.__module__ or "").startswith("torch.")


def _frozen(values: list[Any]) -> list[Any]:
    """The state of mutable values, as what stays equal only as long as they do not change."""
    left = [_NODES]
    seen: dict[int, Any] = {}
    return [_freeze(value, _DEPTH, left, seen) for value in values]


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _freeze(value: Any, depth: int, left: list[int], seen: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value if isinstance(value, str) else (type(value), value)
    if id(value) in seen:
        return seen[id(value)]
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        raise Unknowable("attributes are too many or too deep")
    seen[id(value)] = ("seen", id(value))
    if isinstance(value, Tensor):
        made: Any = (id(value), value.shape, value.dtype)
    elif isinstance(value, dict):
        # The order counts: a forward may run through it.
        made = [
            (_freeze(k, depth - 1, left, seen), _freeze(v, depth - 1, left, seen))
            for k, v in list(value.items())
        ]
    elif isinstance(value, list | tuple):
        made = [_freeze(one, depth - 1, left, seen) for one in value]
    elif isinstance(value, set | frozenset):
        made = sorted(map(repr, value))
    elif isinstance(value, nn.Module) or isroutine(value):
        made = ()  # modules are compared as such, code by identity
    elif isinstance(value, np.ndarray):
        if value.nbytes > _ARRAY or value.dtype.hasobject:
            raise Unknowable("an array is too large")
        made = (value.shape, value.dtype, value.tobytes())
    else:
        held = dict(getattr(value, "__dict__", {}))
        slots = (s for c in type(value).__mro__ for s in _listed(c.__dict__.get("__slots__", ())))
        held.update({s: getattr(value, s, None) for s in slots if not s.startswith("__")})
        made = [(name, _freeze(one, depth - 1, left, seen)) for name, one in held.items()]
    made = (type(value), id(value), made)
    seen[id(value)] = made
    return made
