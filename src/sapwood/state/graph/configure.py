"""What a module is: its class, the attributes that shape what it computes, its own tensors.

Attributes are those the constructor takes by the same name, as Keras's ``get_config`` has them, and
not ``extra_repr``, whose text changes with torch's versions; a class outside of torch that writes
an ``extra_repr`` of its own adds it. An attribute that has its default is left out, so that a
version of torch with a new option gives the same ids.
"""

from __future__ import annotations

import enum
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sapwood.state.graph.builder import Owner, Slot
from sapwood.state.graph.model import Config
from sapwood.state.tensors import clean_name

__all__ = ["class_name", "describe_module", "find_owners", "is_leaf", "parts_of_leaves"]

_log = logging.getLogger(__name__)
_NOT_STRUCTURE = frozenset(
    {"self", "name", "device", "dtype", "inplace", "training", "requires_grad"}
)
_NOISE = re.compile(
    r"(?:^|,\s*)(?:device|dtype|inplace|training|requires_grad)=[^,()]*(?:\([^()]*\))?|"
    r" at 0x[0-9a-f]+"
)
_MISSING = object()
_PARAMETRIZATIONS = "parametrizations"


def class_name(cls: type) -> str:
    """The qualified name of a class, the same however its module was loaded."""
    if getattr(nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"  # where in torch.nn it is defined may change
    module = cls.__module__
    if module in ("__main__", "__mp_main__"):
        main = sys.modules.get(module)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None and spec.name not in ("__main__", "__mp_main__"):
            module = spec.name.removesuffix(".__main__")
        elif file:
            module = Path(file).stem  # as another program that imports it has it
    return f"{module}.{cls.__qualname__}"


def real_class(module: nn.Module) -> type:
    """The class the user wrote, without those that parametrizations and FSDP derive from it."""
    cls = type(module)
    while True:
        bases = [base for base in cls.__bases__ if base.__name__ != "FSDPModule"]
        derived = len(bases) < len(cls.__bases__) or (
            is_parametrized(module) and cls.__name__ == f"Parametrized{bases[0].__name__}"
        )
        if not derived:
            return cls
        cls = bases[0]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one layer: it has no children that compute something by themselves."""
    if type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return False  # an empty one is no layer
    return all(
        name == _PARAMETRIZATIONS or isinstance(child, nn.ParameterList | nn.ParameterDict)
        for name, child in module.named_children()
    )


def parts_of_leaves(model: nn.Module) -> set[int]:
    """Ids of modules below a leaf: they are no layers by themselves."""
    leaves = (module for module in model.modules() if is_leaf(module))
    return {id(part) for leaf in leaves for part in leaf.modules() if part is not leaf}


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Local name, tensor, and whether it is a buffer, for all that the state dict has of a layer.

    A leaf's parametrizations and parameter lists are its own; other children's tensors are not.
    """
    for name, part in module.named_modules() if is_leaf(module) else [("", module)]:
        prefix = f"{name}." if name else ""
        for local, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + local, parameter, False
        for local, buffer in part._buffers.items():
            if buffer is not None and local not in part._non_persistent_buffers_set:
                yield prefix + local, buffer, True


def describe_module(module: nn.Module, tensors: Any = ()) -> Config:
    """A module's configuration; ``tensors`` are local names and shapes of its own tensors."""
    cls = real_class(module)
    settings = dict(_attributes(module, cls))
    written = getattr(getattr(cls, "extra_repr", None), "__module__", None) or ""
    if written.split(".")[0] != "torch":
        try:
            text = _NOISE.sub("", module.extra_repr()).strip(" ,")
        except Exception as error:  # a user's code: a layer is described without it
            _log.debug("extra_repr of %s failed: %s", class_name(cls), error)
            text = ""
        if text:
            settings["extra_repr"] = text
    if is_parametrized(module):
        parametrizations: Any = module.parametrizations
        for name, listed in parametrizations.items():
            kinds = [describe_module(one) for one in listed]
            settings[f"parametrization {name}"] = "; ".join(f"{k.kind}{k.settings}" for k in kinds)
    return Config(class_name(cls), tuple(sorted(settings.items())), tuple(sorted(tensors)))


@lru_cache(maxsize=4096)
def constructor_defaults(cls: type) -> dict[str, Any]:
    """What a class's constructors take, with defaults, those of the class itself first."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        init = base.__dict__.get("__init__")
        if init is None:
            continue
        try:
            parameters = inspect.signature(init).parameters.values()
        except (TypeError, ValueError):
            continue
        for one in parameters:
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                found.setdefault(one.name, one.default)
    for name in getattr(cls, "__constants__", ()):
        found.setdefault(name, inspect.Parameter.empty)
    return {name: value for name, value in found.items() if name not in _NOT_STRUCTURE}


def _attributes(module: nn.Module, cls: type) -> Iterator[tuple[str, str]]:
    for name, default in constructor_defaults(cls).items():
        value = module.__dict__.get(name, _MISSING)
        if value is _MISSING:
            value = getattr(cls, name, _MISSING)
        text = plain_text(value)
        if text is not None and text != plain_text(default):
            yield name, text


def plain_text(value: Any) -> str | None:
    """A structural attribute as text; None for what is no plain value."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses (numpy's numbers) are written as the plain value they stand for.
        return repr(value if value is None else _plain_type(value)(value))
    if isinstance(value, list | tuple):
        items = [plain_text(one) for one in value]
        return None if None in items else f"({', '.join(map(str, items))})"
    if isinstance(value, dict):
        pairs = [(plain_text(k), plain_text(v)) for k, v in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return "{" + ", ".join(sorted(f"{k}: {v}" for k, v in pairs)) + "}"
    if isinstance(value, type) and value is not inspect.Parameter.empty:
        return class_name(value)
    if inspect.isroutine(value) and not inspect.ismethod(value):
        return f"function {getattr(value, '__qualname__', value.__name__)}"
    return None


def _plain_type(value: Any) -> Any:
    return next(kind for kind in (bool, int, float, str) if isinstance(value, kind))


def find_owners(model: nn.Module) -> tuple[list[Owner], dict[int, int]]:
    """All modules with tensors of their own, and the index of each by the id of the module.

    Parts of a leaf (its parametrizations, parameter lists) have the index of the leaf.
    """
    owners: list[Owner] = []
    index: dict[int, int] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(clean_name(path))
    for module in model.modules():
        if id(module) in index:
            continue
        held = sorted(own_tensors(module), key=lambda one: one[0])
        if not held:
            continue
        for part in module.modules() if is_leaf(module) else (module,):
            index[id(part)] = len(owners)
        shapes = [(local, tuple(tensor.shape)) for local, tensor, _ in held]
        places = paths[id(module)]
        slots = tuple(
            Slot(
                local=local,
                tensor=id(tensor),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                buffer=buffer,
                names=tuple(clean_name(f"{place}.{local}".lstrip(".")) for place in places),
            )
            for local, tensor, buffer in held
        )
        owners.append(Owner(places[0], describe_module(module, shapes), slots))
    return owners, index


def functional(name: str) -> Config:
    """The configuration of a layer that is a function call."""
    return Config(f"function {name}")


_FUNCTIONS = (
    "relu relu6 elu selu celu gelu silu mish leaky_relu prelu rrelu glu softplus softsign tanh "
    "tanhshrink sigmoid logsigmoid hardtanh hardswish hardsigmoid hardshrink softshrink "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d interpolate upsample "
    "pixel_shuffle pixel_unshuffle fold unfold grid_sample"
)
_PLAIN_FUNCTIONS = frozenset(_FUNCTIONS.split())


def function_layer(name: str) -> str | None:
    """The layer a function is the functional form of: activations, poolings, up-sampling.

    Not softmax, dropout and arithmetic: whether those are called depends on how attention is
    computed on a device, and on ``training``.
    """
    name = name.rstrip("_").removesuffix("_with_indices")
    return name if name in _PLAIN_FUNCTIONS else None


def is_lazy(tensor: Any) -> bool:
    """Whether a parameter has no shape yet."""
    return torch.nn.parameter.is_lazy(tensor)
