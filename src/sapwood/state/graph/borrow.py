"""Lets a forward run on a model without leaving a trace in it.

For the time of the run every module gets another ``__dict__``: with copies of its parameters and
buffers (on the meta device, or real ones), copies of its plain attributes and containers, without
the user's hooks, in evaluation mode. Whatever the forward assigns goes away with that ``__dict__``;
then each module gets its own back, the same object. So nothing has to be undone.

What can still be seen from outside: changes to objects of other kinds that attributes refer to,
and what the forward does to the world. Another thread must not use the model meanwhile.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sapwood.errors import GraphError
from sapwood.state.graph.configure import is_lazy
from sapwood.state.tensors import unwrap

__all__ = ["ALONE", "Borrowed", "borrow", "check_model", "quiet_random"]

_HOOKS = frozenset(
    {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
)
_COMPUTING_HOOKS = "torch.nn.utils."  # weight norm, spectral norm, pruning: they make the weight
ALONE = threading.RLock()
"""Held while a model is looked at: half of a borrowed model must not be taken for the model."""
Wrap = Callable[[nn.Module, Callable[..., Any]], Callable[..., Any] | None]


@dataclass
class Borrowed:
    """What stands in for what during a run."""

    model: nn.Module
    meta: bool
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    """The copy of each of the model's tensors, by the id of the original."""
    views: list[tuple[Tensor, int]] = field(default_factory=list)
    """Stand-ins of attributes that are views of the model's tensors, with the original's id."""
    originals: list[Any] = field(default_factory=list)
    """Keeps what ids refer to alive."""

    def tensor(self, value: Tensor) -> Tensor:
        """The stand-in of a parameter, a buffer or another tensor that an attribute holds."""
        found = self.stand_ins.get(id(value))
        if found is None:
            found = self._alias(value) if _has_storage(value) else None
            self._keep(value, value.detach().clone() if found is None else found)
        return self.stand_ins[id(value)]

    def add(self, value: Tensor) -> None:
        """Make the stand-in of one of the model's own tensors."""
        if id(value) in self.stand_ins:
            return
        made = _empty_like(value) if self.meta else value.detach().clone()
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        self._keep(value, made)

    def _keep(self, value: Tensor, made: Tensor) -> None:
        self.originals.append(value)
        self.stand_ins[id(value)] = made

    def _alias(self, value: Tensor) -> Tensor | None:
        """A view of a parameter that is kept as an attribute: the same view of its stand-in."""
        storage = value.untyped_storage()._cdata
        for original in list(self.originals):
            if not isinstance(original, Tensor) or not _has_storage(original):
                continue
            if original.untyped_storage()._cdata == storage and value.dtype == original.dtype:
                made = self.stand_ins[id(original)].detach()
                offset = value.storage_offset() - original.storage_offset()
                if offset >= 0 and made.stride() == original.stride():
                    view = made.as_strided(value.shape, value.stride(), offset)
                    self.views.append((view, id(original)))
                    return view
        return None


def check_model(model: nn.Module) -> None:
    """Refuse models without an architecture that can be told.

    Raises:
        GraphError: parameters have no shape yet, or modules are TorchScript.
    """
    for name, module in model.named_modules():
        if any(is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
            raise GraphError(
                f"module {name or 'itself'} has lazy parameters without a shape; run one forward "
                "before the model is stored"
            )


@contextmanager
def borrow(model: nn.Module, *, meta: bool, wrap: Wrap) -> Iterator[Borrowed]:
    """Set the model up for a run; ``wrap`` may put something around a module's ``forward``.

    Raises:
        GraphError: it holds TorchScript modules, whose attributes cannot be exchanged.
    """
    root = unwrap(model)
    modules = _modules(root)
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        raise GraphError("TorchScript modules cannot be traced")
    borrowed = Borrowed(root, meta)
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                borrowed.add(tensor)
    memo: dict[int, Any] = {}
    with ALONE, ExitStack() as back:
        # All are made before the first is exchanged: ``forward`` below is the user's own.
        states = [(m, _state(m, borrowed, memo, wrap(m, m.forward))) for m in modules]
        for module, state in states:
            back.callback(object.__setattr__, module, "__dict__", module.__dict__)
            object.__setattr__(module, "__dict__", state)
        yield borrowed


def _modules(root: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [unwrap(child) for child in module._modules.values() if child is not None]
    return list(found.values())


def _state(module: nn.Module, borrowed: Borrowed, memo: dict[int, Any], forward: Any) -> Any:
    state: dict[str, Any] = {}
    made: Any
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers"):
            made = {k: v if v is None else borrowed.tensor(v) for k, v in value.items()}
        elif name == "_modules":
            made = {k: v if v is None else unwrap(v) for k, v in value.items()}
        elif name in _HOOKS:
            made = OrderedDict((k, h) for k, h in value.items() if _computes(h))
        elif name == "_compiled_call_impl":
            made = None
        elif name == "training":
            made = False
        else:
            made = _copied(value, borrowed, memo)
        state[name] = made
    if forward is not None:
        state["forward"] = forward
    return state


def _computes(hook: Any) -> bool:
    owner = type(hook) if not hasattr(hook, "__module__") or not callable(hook) else hook
    where = getattr(owner, "__module__", None) or type(hook).__module__
    return str(where).startswith(_COMPUTING_HOOKS)


def _copied(value: Any, borrowed: Borrowed, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    made = value
    kind = type(value)
    if isinstance(value, Tensor):
        made = borrowed.tensor(value)
    elif kind in (list, deque):
        made = memo[id(value)] = copy.copy(value)
        made.clear()
        made.extend(_copied(one, borrowed, memo) for one in value)
    elif kind in (dict, OrderedDict, defaultdict, Counter):
        made = memo[id(value)] = copy.copy(value)
        for key, one in value.items():
            made[key] = _copied(one, borrowed, memo)
    elif kind is tuple:
        made = tuple(_copied(one, borrowed, memo) for one in value)
    elif kind in (set, bytearray):
        made = kind(value)
    elif isinstance(value, torch.Generator):
        made = value.clone_state()
    elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
        made = copy.deepcopy(value)
    if made is not value:
        memo[id(value)] = made
        borrowed.originals.append(value)
    return made


def _has_storage(value: Tensor) -> bool:
    try:
        value.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False  # a subclass that wraps others
    return True


def _empty_like(value: Tensor) -> Tensor:
    if _has_storage(value) and value.layout is torch.strided and type(value) in _OWN_CLASSES:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


_OWN_CLASSES = (Tensor, nn.Parameter, nn.Buffer)


@contextmanager
def quiet_random() -> Iterator[None]:
    """Random numbers are the same in every run, and afterwards all generators go on as before."""
    python, legacy = random.getstate(), np.random.get_state()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if started else ()
    with torch.random.fork_rng(devices=devices):
        try:
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
