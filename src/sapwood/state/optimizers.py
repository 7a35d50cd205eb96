"""What of an optimizer is saved how: its tensors by name, the rest as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError

__all__ = [
    "COMMON",
    "check_own_state",
    "is_named",
    "optimizer_tensors",
    "plain_state",
    "set_common_state",
]

COMMON = ""
"""Under this name, which no parameter has, is the state that is not of one parameter."""


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's tensors for one parameter, by the optimizer's own names."""
    if parameter not in optimizer.state:
        return {}
    return {k: v for k, v in optimizer.state[parameter].items() if is_named(k, v)}


def is_named(key: Any, value: Any) -> bool:
    """Whether ``<parameter>/<key>`` can be the tensor's name, from which both can be told."""
    return isinstance(value, Tensor) and isinstance(key, str) and "/" not in key


def plain_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, dict[Any, Any]]:
    """An optimizer's state beside ``optimizer_tensors``, by parameter, and ``COMMON``."""
    found: dict[str, dict[Any, Any]] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        rest = {k: v for k, v in state.items() if not is_named(k, v)}
        if rest:
            found[name] = rest
    common = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return {**found, COMMON: common} if common else found


def set_common_state(optimizer: torch.optim.Optimizer, common: dict[Any, Any]) -> None:
    """Replace the state that is not of one parameter."""
    for key in [k for k in optimizer.state if not isinstance(k, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(common)


def check_own_state(optimizer: torch.optim.Optimizer) -> None:
    """See that ``optimizer.state`` and its groups are all there is to save.

    Raises:
        CheckpointError: its ``state_dict()`` has more, or other things.
    """
    plain = torch.optim.Optimizer.state_dict
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    if type(optimizer).state_dict is plain and not any(hooks):
        return
    kind = type(optimizer).__name__
    try:
        theirs = optimizer.state_dict()
        more = sorted(map(str, theirs.keys() - {"state", "param_groups"}))
        held = sum(isinstance(key, Tensor) for key in optimizer.state)
        other = len(theirs.get("state", ())) != len(optimizer.state)
    except Exception as error:
        more, other, held = [f"{type(error).__name__}: {error}"], False, 0
    if more or other:
        what = ", ".join(more) or f"the state of other than its {held} parameters"
        raise CheckpointError(
            f"the state_dict() of {kind} holds more than the state of parameters and groups "
            f"({what}), which would be lost; let it be saved whole, with "
            'shared={"optimizer": optimizer}'
        )
