"""Stable names for a run's tensors.

A tensor has one name, the same with and without ``torch.compile`` or DistributedDataParallel
around the model, so that a checkpoint, a clone and a repository agree on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = [
    "clean_name",
    "describe_model",
    "named_buffers",
    "named_parameters",
    "other_names",
    "unwrap",
    "writable",
]

_COMPILED = "_orig_mod"
_WRAPPED = "_wrapped_module"
_WRAPPERS = frozenset({_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """The name of a tensor without what wrappers add to it."""
    if _COMPILED not in name and _WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and ``torch.compile``, in any order, or itself."""
    while True:
        children = dict(model.named_children())
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = children["module"]
        elif children.keys() == {_COMPILED}:
            model = children[_COMPILED]
        else:
            return model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by clean name, each once, in registration order."""
    return {clean_name(name): p for name, p in unwrap(model).named_parameters()}


def named_buffers(model: nn.Module, *, training_only: bool = False) -> dict[str, Tensor]:
    """All buffers by clean name; with ``training_only``, those of modules in training mode."""
    inner = unwrap(model)
    found = {clean_name(name): b for name, b in inner.named_buffers()}
    if not training_only:
        return found
    # By identity: a buffer that two modules share keeps the one name it has.
    training = {id(b) for m in inner.modules() if m.training for b in m.buffers(recurse=False)}
    return {name: b for name, b in found.items() if id(b) in training}


def other_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied tensors, each with the one name the tensor has elsewhere here."""
    inner = unwrap(model)
    first = {id(t): n for n, t in (*named_parameters(inner).items(), *named_buffers(inner).items())}
    named = (
        *inner.named_parameters(remove_duplicate=False),
        *inner.named_buffers(remove_duplicate=False),
    )
    found = {clean_name(name): first[id(tensor)] for name, tensor in named}
    return {name: known for name, known in found.items() if name != known}


def writable(target: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What to copy where: an expanded tensor has memory for one of the elements that share it.

    torch refuses to write to the others, though what is written would be the same.
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    return target, value


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
