"""Giving a run a state that came from elsewhere, all of it or nothing.

``check`` needs names, shapes and settings only, so that a state that does not fit is refused before
its bytes are read. ``prepare`` makes everything that can fail: it looks at values and places the
optimizer's tensors on their devices. What is left is ``Change.apply``, which copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, differences
from sapwood.state.contents import Contents, to_torch_dtype
from sapwood.state.kinds import check_group_count
from sapwood.state.optimizers import COMMON, set_common_state
from sapwood.state.plain import from_plain
from sapwood.state.tensors import writable

__all__ = [
    "Change",
    "GivenState",
    "apply_groups",
    "apply_optimizer",
    "as_tensor",
    "check",
    "prepare",
]

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


@dataclass
class Change:
    """A state on its way into a run: everything is there and fits, nothing is changed yet."""

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The run's tensors, and what goes into each."""
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """The optimizer's parameter groups, and the settings each gets."""
    optimizer: torch.optim.Optimizer | None = None
    states: dict[nn.Parameter, dict[Any, Any]] = field(default_factory=dict)
    """What the optimizer knows of each parameter; empty: nothing."""
    common: dict[Any, Any] = field(default_factory=dict)
    """What it knows beside that."""

    def apply(self) -> None:
        """Change the run; the optimizer's state may then be the given memory itself."""
        with torch.no_grad():
            for target, value in self.copies:
                target.copy_(value)
        for group, settings in self.groups:
            group.update(settings)
        if self.optimizer is None:
            return
        for parameter, values in self.states.items():
            if not values:
                self.optimizer.state.pop(parameter, None)
                continue
            here = self.optimizer.state[parameter]
            here.clear()
            here.update(values)
        set_common_state(self.optimizer, self.common)


def check(contents: Contents, catalog: Catalog) -> None:
    """See that a run with these tensors can take a state of that catalog; see ``Kinds``, too.

    Raises:
        CheckpointError: it is of another model; every difference is listed.
    """
    here = contents.catalog
    wanted = {key: entry for key, entry in here.by_key.items() if key[0] == "model"}
    lines = differences(Catalog(tuple(e for e in catalog.entries if e.file == "model")), wanted)
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise CheckpointError(
            "the checkpoint is of another model:\n  " + "\n  ".join([*lines[:_SHOWN], *more])
        )


def prepare(
    contents: Contents, optimizer: torch.optim.Optimizer, state: GivenState, *, with_optimizer: bool
) -> Change:
    """Make ready to give a run a state that ``check`` accepts; nothing is changed yet.

    ``contents`` are the run's tensors as ``check`` has seen them.

    Raises:
        CheckpointError: a tensor of the run cannot hold its values.
    """
    change = Change()
    for key, tensor in contents.tensors.items():
        if key[0] == "model":
            change.copies.append(_fitted(key[1], tensor, as_tensor(state, key)))
    if with_optimizer:
        _prepare_optimizer(change, contents.parameters, optimizer, state)
    return change


def apply_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, given: GivenState
) -> None:
    """Give an optimizer what it knows of its parameters; see ``apply_groups`` for the rest."""
    change = Change()
    _prepare_optimizer(change, parameters, optimizer, given)
    change.groups = []
    change.apply()


def apply_groups(optimizer: torch.optim.Optimizer, common: Mapping[str, Any]) -> None:
    """Give an optimizer's parameter groups the settings of a state."""
    for group, settings in zip(optimizer.param_groups, _settings(optimizer, common), strict=True):
        group.update(settings)


def as_tensor(state: GivenState, key: tuple[str, str]) -> Tensor:
    """One tensor of a state, on the CPU."""
    entry = state.catalog.by_key[key]
    dtype = to_torch_dtype(entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    raw: Any = state.tensors[key]
    return torch.from_numpy(np.asarray(raw)).view(dtype).view(entry.shape)


def _fitted(name: str, tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What to copy where, if the run's tensor can hold all of the value."""
    target, first = writable(tensor, value)
    if target is not tensor and not _same_bytes(first.expand_as(value), value):
        raise CheckpointError(
            f"model {name} is expanded here, so that many of its elements share memory, and the "
            "checkpoint has different values for them; make it contiguous"
        )
    return target, first


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Bit for bit: not a number is equal to itself."""
    ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(ours, theirs)


# -- the optimizer ---------------------------------------------------------------------------


def _settings(optimizer: torch.optim.Optimizer, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each parameter group."""
    check_group_count(optimizer, len(common.get("groups", ())))
    try:
        return [dict(from_plain(group)) for group in common["groups"]]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's parameter groups cannot be read: {error!r}; restore with "
            "optimizer=False"
        ) from error


def _plain_states(common: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """Optimizer state that is not named tensors, by parameter."""
    try:
        return {str(name): dict(v) for name, v in from_plain(common["optimizer"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's optimizer state cannot be read: {error!r}; restore with "
            "optimizer=False"
        ) from error


def _prepare_optimizer(
    change: Change,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    given: GivenState,
) -> None:
    settings = _settings(optimizer, given.common)
    change.optimizer = optimizer
    change.groups = list(zip(optimizer.param_groups, settings, strict=True))
    state: dict[str, dict[Any, Any]] = {}
    for file, name in given.catalog.by_key:
        if file == "optimizer":
            owner, part = _parted(name, parameters)
            state.setdefault(owner, {})[part] = as_tensor(given, (file, name))
    for owner, values in _plain_states(given.common).items():
        state.setdefault(owner, {}).update(values)
    change.common = state.pop(COMMON, {})
    clocks_on_device = {
        id(p): any(new.get(name, group.get(name)) for name in ("capturable", "fused"))
        for group, new in change.groups
        for p in group["params"]
    }
    for name, parameter in parameters.items():
        on_device = clocks_on_device.get(id(parameter), False)
        change.states[parameter] = {
            part: _placed(value, parameter) if part != "step" or on_device else value
            for part, value in state.get(name, {}).items()
        }


def _parted(name: str, parameters: Collection[str]) -> tuple[str, str]:
    """A parameter's name and the optimizer's own, which in older checkpoints may have slashes."""
    at = name.rfind("/")
    while at > 0 and name[:at] not in parameters:
        at = name.rfind("/", 0, at)
    if at <= 0:
        at = name.rfind("/")
    return name[:at], name[at + 1 :]


def _placed(value: Any, parameter: Tensor) -> Any:
    """Beside the parameter, where torch's own optimizers expect all but counters."""
    if not isinstance(value, Tensor):
        return value
    placed = value.to(parameter.device)
    if placed.shape == parameter.shape and placed.stride() != parameter.stride():
        # In the parameter's own order of memory, as the optimizer made it.
        return torch.empty_like(parameter, dtype=placed.dtype).copy_(placed)
    return placed
