"""Options of an optimizer that a fork changes: whether there are such, and whether it takes them.

An optimizer validates its options when it is made, and some only when it steps. So a small one of
the same class is made, and for torch's own stepped, with the new values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sapwood.clone.schedules import OF_SCHEDULES
from sapwood.errors import ConfigError

__all__ = ["apply_changes", "check_changes"]

Changes = Sequence[Mapping[str, tuple[str, Any]]]
"""For each parameter group, by option: the path that asks for it, and the value."""
_KERNELS = ("capturable", "differentiable", "foreach", "fused")


def check_changes(
    changes: Changes,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """See that an optimizer has these options and takes these values; it is not touched.

    ``groups`` has the options it is going to be given; by default they are those it has.

    Raises:
        ConfigError: it has none of the name, of another type, or does not take the value.
    """
    for changed, group in zip(changes, groups or optimizer.param_groups, strict=True):
        for name, (path, value) in changed.items():
            _check_name(path, name, group, optimizer)
            _check_type(path, value, group[name])
        _try(changed, group, optimizer)


def apply_changes(changes: Changes, optimizer: torch.optim.Optimizer) -> None:
    """Set the options.

    Raises:
        ConfigError: a group has no such option.
    """
    for changed, group in zip(changes, optimizer.param_groups, strict=True):
        for name, (path, value) in changed.items():
            _check_name(path, name, group, optimizer)
            if isinstance(group[name], Tensor):
                group[name].fill_(value)  # a captured graph reads this very tensor
            else:
                group[name] = _like(group[name], value)


def _check_name(
    path: str, name: str, group: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    driven = name in OF_SCHEDULES and name not in optimizer.defaults
    if name in group and name != "params" and not driven and name not in _KERNELS:
        return
    left_out = {"params", *_KERNELS, *(OF_SCHEDULES - optimizer.defaults.keys())}
    known = ", ".join(sorted(k for k in group if k not in left_out))
    if name in group and driven:
        raise ConfigError(
            f"{path} is a scheduler's; change optimizer.lr, and all rates of the schedule go with "
            f"it. The optimizer's groups have {known}"
        )
    if name in group and name in _KERNELS:
        raise ConfigError(
            f"{path} says how torch computes an update, which a fork does not change: set it in "
            f"the script. The optimizer's groups have {known}"
        )
    raise ConfigError(f"{path} leads nowhere; the optimizer's groups have {known}")


def _check_type(path: str, value: Any, old: Any) -> None:
    wanted = _wanted(old)
    if not _fits(value, old):
        raise ConfigError(f"{path} is {value!r}, expected {wanted}")


def _fits(value: Any, old: Any) -> bool:
    if isinstance(old, bool):
        return isinstance(value, bool)
    if isinstance(old, (int, float)) or (isinstance(old, Tensor) and old.numel() == 1):
        return not isinstance(value, bool) and isinstance(value, (int, float)) and _finite(value)
    if isinstance(old, (tuple, list)):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(old)
            and all(_fits(v, o) for v, o in zip(value, old, strict=True))
        )
    if isinstance(old, str):
        return isinstance(value, str)
    # None stands for a choice of the optimizer's own, which any plain value may replace.
    return old is None and (value is None or isinstance(value, (bool, int, float, str)))


def _finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _wanted(old: Any) -> str:
    if isinstance(old, bool):
        return "true or false"
    if isinstance(old, (int, float, Tensor)):
        return "a number"
    if isinstance(old, (tuple, list)):
        return f"{len(old)} values, as in {list(old)}"
    if isinstance(old, str):
        return f"text, as in {old!r}"
    return f"something like {old!r}, which a command line cannot say; set it in the script"


def _like(old: Any, value: Any) -> Any:
    """A value in the type the optimizer has it in."""
    if isinstance(old, (tuple, list)):
        return type(old)(_like(o, v) for o, v in zip(old, value, strict=True))
    if isinstance(old, float) and isinstance(value, int):
        return float(value)
    return value


# -- trials ----------------------------------------------------------------------------------


def _try(
    changed: Mapping[str, tuple[str, Any]],
    group: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Make a small optimizer as this one is, and with the new values."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    options = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name in taken and name not in ("params", *_KERNELS)
    }
    new = {name: _like(group[name], value) for name, (_, value) in changed.items()}
    known = {name: value for name, value in new.items() if name in taken}
    steps = _may_step(kind)
    if not new or _failure(kind, options, {}, steps=False) is not None:
        return  # it cannot be made from its options alone: its own step will tell
    steps = steps and _failure(kind, options, {}, steps=True) is None
    if _failure(kind, options, known, steps=steps) is None:
        return
    # To say which it is; if each could be by itself, it is all of them together.
    for subset in [*({name: value} for name, value in known.items()), known]:
        why = _failure(kind, options, subset, steps=steps)
        if why is not None:
            paths = ", ".join(f"{changed[name][0]}={changed[name][1]!r}" for name in subset)
            raise ConfigError(f"{paths} is nothing {kind.__name__} takes: {why}")


def _may_step(kind: type[torch.optim.Optimizer]) -> bool:
    """Only torch's own: another's step may send messages, or count how often it was called."""
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return kind.__module__.startswith("torch.optim.") and not any(hooks)


def _failure(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    steps: bool,
) -> str | None:
    """What an optimizer of this kind says to new options, made so, and then in mid-training."""
    try:
        # Two dimensions, which all take, and as many lines and columns as any needs.
        kind([nn.Parameter(torch.zeros(2, 2))], **{**options, **new})
    except Exception as error:  # whatever a class raises to refuse
        return str(error) or type(error).__name__
    if not steps:
        return None
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    trial = kind([parameter], **options)
    try:
        trial.step()
        trial.param_groups[0].update(new)
        trial.step()
    except Exception as error:
        return f"with the state the run has, its step raises {type(error).__name__}: {error}"
    return None
