"""Giving a run the state of a checkpoint, all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sapwood.checkpoint.contents import collect, to_torch_dtype
from sapwood.checkpoint.plain import from_plain
from sapwood.checkpoint.restore import Loaded
from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, differences
from sapwood.state.tensors import named_parameters

__all__ = ["apply", "as_tensor"]

_SHOWN = 20


def apply(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Loaded, *, with_optimizer: bool
) -> None:
    """Give a run a loaded checkpoint; the optimizer's state may be the loaded memory itself.

    Raises:
        CheckpointError: it is of another model; every difference is listed.
    """
    contents = collect(model, optimizer, lambda name: (0,))
    _check(loaded.catalog, contents.catalog)
    if with_optimizer:
        _check_groups(optimizer, loaded.common)
    with torch.no_grad():
        for key, tensor in contents.tensors.items():
            if key[0] == "model":
                tensor.copy_(as_tensor(loaded, key))
    if with_optimizer:
        _apply_optimizer(named_parameters(model), optimizer, loaded)


def as_tensor(loaded: Loaded, key: tuple[str, str]) -> Tensor:
    """One tensor of a loaded checkpoint, on the CPU."""
    entry = loaded.catalog.by_key[key]
    dtype = to_torch_dtype(entry.dtype)
    raw: Any = loaded.tensors[key]
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


def _apply_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, loaded: Loaded
) -> None:
    for group, saved in zip(optimizer.param_groups, loaded.common["groups"], strict=True):
        group.update(from_plain(saved))
    state: dict[str, dict[str, Any]] = {}
    for file, name in loaded.catalog.by_key:
        if file == "optimizer":
            owner, _, part = name.rpartition("/")
            state.setdefault(owner, {})[part] = as_tensor(loaded, (file, name))
    for owner, values in from_plain(loaded.common["optimizer"]).items():
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
