"""Giving a run a state that came from elsewhere, all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, differences
from sapwood.state.contents import collect, to_torch_dtype
from sapwood.state.plain import from_plain
from sapwood.state.tensors import named_parameters

__all__ = ["GivenState", "apply", "apply_optimizer", "as_tensor"]

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class GivenState:
    """A run's whole state in this rank's memory, verified."""

    catalog: Catalog
    tensors: Mapping[tuple[str, str], npt.NDArray[np.uint8]]
    common: Mapping[str, Any]
    """The extras of the lowest rank."""
    mine: Mapping[str, Any]
    """The extras of this rank; empty if the saved run had no such rank."""


def apply(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: GivenState, *, with_optimizer: bool
) -> None:
    """Give a run a state; the optimizer's may then be the given memory itself.

    Raises:
        CheckpointError: it is of another model; every difference is listed.
    """
    contents = collect(model, optimizer, lambda name: (0,))
    _check(state.catalog, contents.catalog)
    if with_optimizer:
        _check_groups(optimizer, state.common)
    with torch.no_grad():
        for key, tensor in contents.tensors.items():
            if key[0] == "model":
                tensor.copy_(as_tensor(state, key))
    if with_optimizer:
        apply_optimizer(named_parameters(model), optimizer, state)


def as_tensor(state: GivenState, key: tuple[str, str]) -> Tensor:
    """One tensor of a state, on the CPU."""
    entry = state.catalog.by_key[key]
    dtype = to_torch_dtype(entry.dtype)
    raw: Any = state.tensors[key]
    if not raw.size:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(np.asarray(raw)).view(dtype).view(entry.shape)


def _check(saved: Catalog, here: Catalog) -> None:
    wanted = {key: entry for key, entry in here.by_key.items() if key[0] == "model"}
    model = Catalog(tuple(e for e in saved.entries if e.file == "model"))
    lines = differences(model, wanted)
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise CheckpointError(
            "the checkpoint is of another model:\n  " + "\n  ".join([*lines[:_SHOWN], *more])
        )


def _check_groups(optimizer: torch.optim.Optimizer, common: Mapping[str, Any]) -> None:
    saved, here = len(common["groups"]), len(optimizer.param_groups)
    if saved != here:
        raise CheckpointError(
            f"the optimizer has {here} parameter groups, the checkpoint {saved}; make the same "
            "groups, or restore with optimizer=False"
        )


def apply_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, given: GivenState
) -> None:
    """Give an optimizer its part of a state."""
    for group, saved in zip(optimizer.param_groups, given.common["groups"], strict=True):
        group.update(from_plain(saved))
    state: dict[str, dict[str, Any]] = {}
    for file, name in given.catalog.by_key:
        if file == "optimizer":
            owner, _, part = name.rpartition("/")
            state.setdefault(owner, {})[part] = as_tensor(given, (file, name))
    for owner, values in from_plain(given.common["optimizer"]).items():
        state.setdefault(owner, {}).update(values)
    clocks_on_device = {
        id(p): bool(g.get("capturable") or g.get("fused"))
        for g in optimizer.param_groups
        for p in g["params"]
    }
    for name, parameter in parameters.items():
        if name not in state:
            optimizer.state.pop(parameter, None)
            continue
        here = optimizer.state[parameter]
        here.clear()
        for part, value in state[name].items():
            on_device = part != "step" or clocks_on_device.get(id(parameter), False)
            here[part] = _placed(value, parameter) if on_device else value


def _placed(value: Any, parameter: Tensor) -> Any:
    """Beside the parameter, where torch's own optimizers expect all but counters."""
    if not isinstance(value, Tensor):
        return value
    placed = value.to(parameter.device)
    if placed.shape == parameter.shape and placed.stride() != parameter.stride():
        # In the parameter's own order of memory, as the optimizer made it.
        return torch.empty_like(parameter, dtype=placed.dtype).copy_(placed)
    return placed
