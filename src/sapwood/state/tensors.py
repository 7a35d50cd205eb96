"""Stable names for a run's tensors.

A tensor has one name, the same with and without ``torch.compile`` or DistributedDataParallel
around the model, so that a checkpoint, a clone and a repository agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """The name of a tensor without what wrappers add to it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, or the model itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by clean name, each once, in registration order."""
    return {clean_name(name): p for name, p in unwrap(model).named_parameters()}


def named_buffers(model: nn.Module, *, training_only: bool = False) -> dict[str, Tensor]:
    """All buffers by clean name; with ``training_only``, those of modules in training mode."""
    if not training_only:
        return {clean_name(name): b for name, b in unwrap(model).named_buffers()}
    return dict(_training_buffers(unwrap(model)))


def _training_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if not module.training:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's tensors for one parameter, by the optimizer's own names."""
    if parameter not in optimizer.state:
        return {}
    return {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}


def describe_model(model: nn.Module) -> list[str]:
    """One line per parameter and buffer; ranks whose lines are equal hold the same model."""
    lines = [
        f"parameter {name}: shape {tuple(p.shape)}, {_short(p.dtype)}, on {p.device.type}, "
        f"{'trained' if p.requires_grad else 'frozen'}"
        for name, p in named_parameters(model).items()
    ]
    lines += [
        f"buffer {name}: shape {tuple(b.shape)}, {_short(b.dtype)}, on {b.device.type}"
        for name, b in named_buffers(model).items()
    ]
    return lines


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
