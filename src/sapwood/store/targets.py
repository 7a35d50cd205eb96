"""Putting loaded tensors into a module or into tensors that are there, all of them or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sapwood.errors import ConfigError, DoesNotFit
from sapwood.repository.manifest import Manifest
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["Fit", "check_fit", "check_real", "fill", "named_tensors", "names_of"]


_FOUR_BITS = "float4_e2m1fn_x2"


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
    own = _own_names(target, manifest)
    tensors = {name: tensor for name, (_, tensor) in own.items()}
    problems = [
        problem
        for name in names
        if (problem := _problem(name, tensors, manifest, cast=cast)) is not None
    ]
    if isinstance(target, nn.Module):
        four = [n for n in names if manifest.dtypes[manifest.by_name[n]] == _FOUR_BITS]
        problems += [f"{n}: torch copies no {_FOUR_BITS} into modules, assign it" for n in four]
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
    return Fit(target, {name: own[name][0] for name in names})


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
            _copy(fit.target[fit.here[name]], value)


def check_real(tensors: Mapping[str, Tensor]) -> None:
    """See that tensors can be copied into.

    Raises:
        DoesNotFit: some are on the meta device, where to copy does nothing.
    """
    odd = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
    if odd:
        raise DoesNotFit(
            f"{', '.join(odd)}: on the meta device, where no values can be, and nothing was "
            "changed; see Module.to_empty"
        )


def _copy(target: Tensor, value: Tensor) -> None:
    if value.dtype == torch.float4_e2m1fn_x2:  # torch has no copy of it
        target, value = target.view(torch.uint8), value.view(torch.uint8)
    target.copy_(value)


def names_of(target: nn.Module | Mapping[str, Any], manifest: Manifest) -> set[str]:
    """The names of the tensors a target has, as ``check_fit`` knows them."""
    return set(_own_names(target, manifest))


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
    if dtype != row.dtype and (not cast or _FOUR_BITS in (dtype, row.dtype)):
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
    return {clean_name(name): tensor for name, tensor in _tensors_of(target)}


def _own_names(
    target: nn.Module | Mapping[str, Any], manifest: Manifest
) -> dict[str, tuple[str, Tensor]]:
    """By name: what the target itself calls a tensor, and the tensor.

    A dictionary may have been saved with the names that wrappers give, and be loaded into as such;
    where two of its names become one, neither stands for the other.
    """
    found = list(_tensors_of(target))
    cleaned = Counter(clean_name(name) for name, _ in found)
    as_is = manifest.by_name.keys() & {name for name, _ in found}
    own = {}
    for name, tensor in found:
        clean = clean_name(name)
        alone = cleaned[clean] == 1 and name not in as_is
        own[clean if alone else name] = name, tensor
    return own


def _tensors_of(target: nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    found: Iterable[tuple[str, Any]]
    if isinstance(target, nn.Module):
        found = unwrap(target).state_dict(keep_vars=True).items()
    elif isinstance(target, Mapping):
        found = target.items()
    else:
        raise ConfigError(
            f"into= is a {type(target).__name__}, expected a module or a dictionary of tensors"
        )
    return ((name, tensor) for name, tensor in found if isinstance(tensor, Tensor))
