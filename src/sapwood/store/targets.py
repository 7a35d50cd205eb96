"""Putting loaded tensors into a module or into tensors that are there, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sapwood.errors import ConfigError, DoesNotFit
from sapwood.repository.manifest import Manifest
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["Fit", "check_fit", "fill", "named_tensors", "names_of"]


@dataclass(frozen=True)
class Fit:
    """What goes where, after it was seen that all of it fits."""

    target: nn.Module | Mapping[str, Tensor]
    here: Mapping[str, str]
    """The target's own name for each name that is loaded."""


def check_fit(
    target: nn.Module | Mapping[str, Any],
    manifest: Manifest,
    names: Sequence[str],
    *,
    what: str,
    strict: bool,
    cast: bool,
) -> Fit:
    """See that every name, shape and dtype fits, before anything is read or changed.

    ``strict``: nothing the target has may be missing in what is loaded. ``cast``: dtypes may
    differ; values are converted.

    Raises:
        DoesNotFit: with everything that does not, each on a line.
    """
    tensors = named_tensors(target)
    problems = [
        problem
        for name in names
        if (problem := _problem(name, tensors, manifest, cast=cast)) is not None
    ]
    if strict:
        missing = sorted(tensors.keys() - set(names))
        problems += [f"{name}: missing in {what}" for name in missing]
    if problems:
        raise DoesNotFit(
            f"{what} does not fit what it is loaded into, and nothing was changed:\n  "
            + "\n  ".join(problems)
            + "\nload a part of it with layers=..., with strict=False what is there of it, or with "
            "cast=True into other dtypes"
        )
    own = _own_names(target)
    return Fit(target, {name: own[name] for name in names})


def fill(fit: Fit, values: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Copy values into the target; ``extra`` are a module's entries that are no tensors."""
    if isinstance(fit.target, nn.Module):
        state = {fit.here[name]: value for name, value in values.items()}
        state.update(extra)
        # As torch does it: a module may have more to do when its state is loaded.
        unwrap(fit.target).load_state_dict(state, strict=False)
        return
    with torch.no_grad():
        for name, value in values.items():
            fit.target[fit.here[name]].copy_(value)


def names_of(target: nn.Module | Mapping[str, Any]) -> set[str]:
    """The names of the tensors a target has."""
    return set(named_tensors(target))


def _problem(
    name: str, tensors: Mapping[str, Tensor], manifest: Manifest, *, cast: bool
) -> str | None:
    row = manifest.row(manifest.by_name[name])
    mine = tensors.get(name)
    if mine is None:
        return f"{name}: not in what it is loaded into"
    if (cannot := _cannot_hold(mine)) is not None:
        return f"{name}: {cannot}"
    dtype = str(mine.dtype).removeprefix("torch.")
    if tuple(mine.shape) != row.shape:
        return f"{name}: shape {list(row.shape)} is stored, {list(mine.shape)} is here"
    if dtype != row.dtype and not cast:
        return f"{name}: dtype {row.dtype} is stored, {dtype} is here"
    return None


def _cannot_hold(target: Tensor) -> str | None:
    """Why nothing can be copied into a tensor; torch would say so after it had changed others."""
    if is_lazy(target):
        return "is not initialised: run one batch through the module first"
    if target.device.type == "meta":
        return "is on the meta device and has no memory: call to_empty(device=...) first"
    if target.layout is not torch.strided:
        return f"is {target.layout} here, and only dense tensors are copied into"
    if any(
        size > 1 and not stride for size, stride in zip(target.shape, target.stride(), strict=True)
    ):
        return "has elements here that share memory (expand): clone it first"
    return None


def named_tensors(target: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a module's state, or of a dictionary, by name."""
    found: Iterable[tuple[str, Any]]
    if isinstance(target, nn.Module):
        found = unwrap(target).state_dict(keep_vars=True).items()
    elif isinstance(target, Mapping):
        found = target.items()
    else:
        raise ConfigError(
            f"into= is a {type(target).__name__}, expected a module or a dictionary of tensors"
        )
    return {clean_name(n): t for n, t in found if isinstance(t, Tensor)}


def _own_names(target: nn.Module | Mapping[str, Any]) -> dict[str, str]:
    names = unwrap(target).state_dict(keep_vars=True) if isinstance(target, nn.Module) else target
    return {clean_name(name): name for name in names}
