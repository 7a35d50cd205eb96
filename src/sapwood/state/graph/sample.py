"""What a forward is called with: any nesting of tensors, by position and by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sapwood.errors import ConfigError

__all__ = ["Sample", "as_sample", "map_tensors"]


class Sample:
    """The arguments of one forward: ``Sample(images, mask=mask)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments as the model's ``forward`` takes them."""
        self.args, self.kwargs = args, kwargs

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """The same arguments with every tensor replaced."""
        args = tuple(map_tensors(one, change) for one in self.args)
        return Sample(*args, **{k: map_tensors(v, change) for k, v in self.kwargs.items()})

    def places(self, model: nn.Module) -> dict[int, str]:
        """Where each tensor is passed, by its id: the argument's position, then keys in it.

        However an argument is passed, and whatever its name, its place is the same.
        """
        found: dict[int, str] = {}
        try:
            signature = inspect.signature(model.forward)
            bound = signature.bind(*self.args, **self.kwargs).arguments
            order = list(signature.parameters)
        except (TypeError, ValueError):
            bound = {**{str(n): one for n, one in enumerate(self.args)}, **self.kwargs}
            order = list(bound)
        for name, value in bound.items():
            _place(value, str(order.index(name)), found)
        return found

    def check(self, model: nn.Module) -> None:
        """See that the model can be called so.

        Raises:
            ConfigError: its forward does not take such arguments.
        """
        try:
            inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        except ValueError:  # no signature to be had
            return
        except TypeError as error:
            raise ConfigError(
                f"sample does not fit {type(model).__name__}.forward: {error}; a tuple is taken as "
                "positional arguments and a mapping as keyword arguments, use Sample(...) to say "
                "exactly what the forward gets"
            ) from None


def as_sample(value: Any) -> Sample:
    """A tuple as positional arguments, a mapping as keyword arguments, else the only argument."""
    if isinstance(value, Sample):
        return value
    if type(value) is tuple:
        return Sample(*value)
    if isinstance(value, Mapping):
        return Sample(**value)
    return Sample(value)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor in it replaced; objects are copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        # Its batch sizes must stay where they are.
        return value._replace(data=change(value.data))
    if isinstance(value, tuple):
        made = [map_tensors(one, change) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, list):
        return [map_tensors(one, change) for one in value]
    if isinstance(value, Mapping):
        made_map = {k: map_tensors(v, change) for k, v in value.items()}
        if type(value) is dict:
            return made_map
        return _refilled(value, made_map)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return _changed(value, {k: map_tensors(v, change) for k, v in fields.items()})
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
        value, type | nn.Module | torch.device
    ):
        near = {k: v for k, v in vars(value).items() if isinstance(v, Tensor | list | dict | tuple)}
        return _changed(value, {k: map_tensors(v, change) for k, v in near.items()})
    return value


def _refilled(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    made = copy.copy(value)
    try:
        for key, one in items.items():
            made[key] = one  # type: ignore[index]
    except TypeError:
        return items
    return made


def _changed(value: Any, attributes: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for name, one in attributes.items():
        object.__setattr__(made, name, one)
    return made


def _place(value: Any, place: str, found: dict[int, str]) -> None:
    if isinstance(value, Tensor):
        found.setdefault(id(value), place)
    elif isinstance(value, list | tuple):
        for n, one in enumerate(value):
            _place(one, f"{place}.{n}", found)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _place(one, f"{place}.{key}", found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            _place(getattr(value, item.name, None), f"{place}.{item.name}", found)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for name, one in vars(value).items():
            if isinstance(one, Tensor | list | dict | tuple):
                _place(one, f"{place}.{name}", found)
