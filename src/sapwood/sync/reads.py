"""Weights that back-propagation reads after their own gradient is complete.

Autograd never needs a weight after its last gradient, unless the model used it behind autograd's
back: through ``detach()`` or ``.data``, or again while a checkpointed segment is recomputed. A
weight that was updated meanwhile would give a wrong gradient. Three checks in every step:

1. While forward runs, each parameter has a class whose ``detach`` and ``data`` note the use. Such
   a weight is *late*: its bucket is updated when back-propagation is over.
2. While back-propagation runs, an updated parameter has a class that notices any operation on it
   from Python: recomputed segments, hooks, custom backward code. In the first step after a new
   plan nothing is updated early, so such a weight is noted, and late from then on; in any other
   step the value that was about to be read is already lost, and the step is refused.
3. An update moves the version counters (fused kernels do not), so that autograd itself refuses a
   saved alias of the old value.

What was aliased before, outside of forward, is found when the watch begins (``aliases``).

Nothing of it costs time per operation: changing an object's class takes 0.1 us.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sapwood.errors import UsageError
from sapwood.state.metadata import METADATA
from sapwood.sync.aliases import aliased_weights
from sapwood.sync.guard import in_backward
from sapwood.sync.nested import tensors_in

__all__ = ["WeightReads"]

log = logging.getLogger(__name__)


def _compiled(model: nn.Module) -> set[int]:
    """Parameters of compiled modules: their code guards on classes, so theirs must not change."""
    return {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for parameter in module.parameters()
    }


class WeightReads:
    """Notes which weights of a model are read behind autograd's back."""

    def __init__(self, context: Watched, refuse: Refuse) -> None:
        """``refuse`` makes the error for a step that cannot be made right."""
        self._names = context.names
        self._refuse = refuse
        self._index = {id(p): i for i, p in enumerate(context.parameters)}
        aside = _compiled(context.model)  # of these only the version counters are watched
        plain = {i: (p, type(p)) for i, p in enumerate(context.parameters) if id(p) not in aside}
        # A class with its own handling of operations cannot be taken over: never updated early.
        own = {i for i, (_, kind) in plain.items() if _watched(kind) is None}
        self._watchable = {i: found for i, found in plain.items() if i not in own}
        for parameter, _ in self._watchable.values():
            _readers[id(parameter)] = self
        self._lock = threading.Lock()
        self._sealed: dict[int, bool] = {}
        """Parameters that must not be read now, by index; True if they are updated already."""
        self._sealing = False
        self._forwards = 0
        self._in_forward: set[int] = set()
        self._said: set[int] = set()
        shared = aliased_weights(context.model, context.parameters)
        self.known: set[int] = own | shared
        """Late in every step."""
        self._say(sorted(shared), "in memory that another tensor of the model shares")

    @property
    def late(self) -> set[int]:
        """Parameters that must be updated after back-propagation."""
        return self.known | self._in_forward

    # -- forward -----------------------------------------------------------------------------

    def start_forward(self) -> None:
        """Watch ``detach`` and ``data`` from now on."""
        self._forwards += 1
        if self._forwards > 1:
            return
        for parameter, kind in self._watchable.values():
            watched = _watched(kind)
            assert watched is not None
            parameter.__class__ = watched

    def end_forward(self) -> None:
        """Stop watching."""
        if self._forwards == 0:
            return
        self._forwards -= 1
        if self._forwards == 0:
            for parameter, kind in self._watchable.values():
                parameter.__class__ = kind

    def aliased(self, parameter: Tensor) -> None:
        """Forward has taken an alias that autograd knows nothing of."""
        index = self._index.get(id(parameter))
        if index is not None:
            self._in_forward.add(index)

    # -- backward ----------------------------------------------------------------------------

    def start_backward(self) -> None:
        """From now on ``seal`` has an effect."""
        with self._lock:
            self._sealing = True

    def seal(self, indices: Iterable[int], *, updated: bool) -> None:
        """Notice reads of these parameters until back-propagation ends."""
        with self._lock:
            if not self._sealing:
                return
            for index in indices:
                if index not in self._watchable:
                    continue
                parameter, kind = self._watchable[index]
                self._sealed[index] = updated
                parameter.__class__ = _sealed(kind)

    def end_backward(self) -> None:
        """Give every parameter its own class again."""
        with self._lock:
            self._sealing = False
            for index in self._sealed:
                parameter, kind = self._watchable[index]
                parameter.__class__ = kind
            self._sealed.clear()

    def close(self) -> None:
        """Watch nothing any more, whatever was under way."""
        self.end_backward()
        self.end_step()

    def end_step(self) -> None:
        """What this step's forwards did says nothing about the next."""
        self._in_forward.clear()
        self._forwards = min(self._forwards, 1)  # one that was interrupted never ended
        self.end_forward()

    def say_new(self, why: str) -> None:
        """Log which weights became late, once for each."""
        self._say(sorted(self.late - self._said), why)

    def _say(self, new: Sequence[int], why: str) -> None:
        self._said.update(new)
        if new:
            names = ", ".join(self._names[i] for i in new[:5])
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            verb = "is" if len(new) == 1 else "are"
            what = f"{names}{more} {verb} {why}"
            log.warning("%s: updated at the end of backward, not during it", what)

    def read(self, parameter: Tensor) -> None:
        """Back-propagation reads a sealed parameter."""
        index = self._index.get(id(parameter))
        if index is None or index not in self._sealed:
            return
        if self._sealed[index]:
            raise self._refuse(_too_late(self._names[index]))
        self.known.add(index)


Refuse = Callable[[str], UsageError]


class Watched(Protocol):
    """A model in training."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names of the trained parameters."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The trained parameters."""
        ...


def _too_late(name: str) -> str:
    return (
        f"back-propagation read {name} again after it had been updated (in a recomputed segment, a "
        "hook or a custom backward), so gradients of this step would be wrong; use "
        "Run(..., update='deferred'), which updates after back-propagation"
    )


_readers: weakref.WeakValueDictionary[int, WeightReads] = weakref.WeakValueDictionary()
_watched_classes: dict[type, type | None] = {}
_sealed_classes: dict[type, type] = {}
_off = torch._C.DisableTorchFunctionSubclass
_plain_dispatch = torch._C._disabled_torch_function_impl


def _watched(kind: type) -> type | None:
    """A subclass that notes aliases; None where it cannot be made."""
    if kind not in _watched_classes:
        ordinary = getattr(kind, "__torch_function__", None) is _plain_dispatch
        _watched_classes[kind] = _make_watched(kind) if ordinary else None
    return _watched_classes[kind]


def _make_watched(kind: type) -> type:
    def note(parameter: Tensor) -> None:
        reader = _readers.get(id(parameter))
        if reader is not None:
            reader.aliased(parameter)

    def detach(self: Any) -> Any:
        note(self)
        return kind.detach(self)  # type: ignore[attr-defined]

    def get_data(self: Any) -> Any:
        note(self)
        return kind.data.__get__(self)  # type: ignore[attr-defined]

    def set_data(self: Any, value: Any) -> None:
        kind.data.__set__(self, value)  # type: ignore[attr-defined]

    body = {"detach": detach, "data": property(get_data, set_data), "__slots__": ()}
    return type(kind)(kind.__name__, (kind,), {**body, "__module__": kind.__module__})


def _sealed(kind: type) -> type:
    if kind not in _sealed_classes:

        def dispatch(
            cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function not in METADATA and in_backward():
                for argument in tensors_in((args, kwargs)):
                    reader = _readers.get(id(argument))
                    if reader is not None:
                        reader.read(argument)
            with _off():
                return function(*args, **(kwargs or {}))

        body = {"__torch_function__": classmethod(dispatch), "__slots__": ()}
        made = type(kind)(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
        _sealed_classes[kind] = made
    return _sealed_classes[kind]
