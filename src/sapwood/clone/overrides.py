"""What is different in a fork: an option of the optimizer, or a value the script asks for.

optimizer.lr        in every parameter group; schedules go on relative to it (``schedules``)
optimizer.1.lr      in one group
scheduler.*         refused: a fork takes its parent's schedules over as they are
anything else       is the script's: ``run.override("data.seed", 0)``

Importing this loads no torch, so that the command line can check values before ranks start.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sapwood.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["apply_overrides", "changes_by_group", "check_overrides", "rate_factors"]

_OPTIMIZER = "optimizer"
_SCHEDULERS = ("scheduler", "schedulers", "lr_scheduler")
_ALIKE = 0.85
_ITS_OWN_WORD = ("schedule", "schedules")
"""Close to a reserved word, but one that scripts use for themselves."""
_NUMBERS = (
    *("alpha", "beta2_decay", "betas", "d", "dampening", "eps", "etas", "lambd", "lr", "lr_decay"),
    *("momentum", "momentum_decay", "ns_steps", "rho", "step_sizes", "t0", "weight_decay"),
)
"""Options of torch's optimizers that are numbers; another optimizer's may be text."""
_NOT_NEGATIVE = ("eps", "lr", "momentum", "weight_decay")


def check_overrides(
    overrides: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    schedulers: Iterable[Any] = (),
) -> None:
    """Refuse what cannot be done, before anybody is asked for a fork; changes nothing.

    Without an optimizer, as on the command line, only what is wrong for every optimizer is found.
    With one, paths, types and values are held against it and the schedulers that drive it.

    Raises:
        ConfigError: a path is misspelt or leads nowhere, a value cannot be meant, or a scheduler
            would undo it.
    """
    for path, value in overrides.items():
        _check_path(path)
        if path.split(".")[0] == _OPTIMIZER:
            _check_value(path, path.rpartition(".")[2], value)
    if optimizer is None:
        return
    from sapwood.clone import options, schedules

    changes = changes_by_group(overrides, optimizer.param_groups)
    options.check_changes(changes, optimizer)
    schedules.check_drivers(changes, schedulers)


def changes_by_group(
    overrides: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, tuple[str, Any]]]:
    """What changes in each parameter group: by option, the path that says so and the value.

    A path that names a group wins over one for all groups, whatever their order.

    Raises:
        ConfigError: a path leads nowhere; what there is.
    """
    found: list[dict[str, tuple[str, Any]]] = [{} for _ in groups]
    for path, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        first, *rest = path.split(".")
        if first != _OPTIMIZER:
            continue
        chosen = range(len(groups))
        if len(rest) == 2:
            chosen = range(int(rest[0]), int(rest[0]) + 1)
        if chosen.stop > len(groups):
            raise ConfigError(f"{path} leads nowhere; there are {len(groups)} parameter groups")
        for number in chosen:
            found[number][rest[-1]] = path, value
    return found


def rate_factors(
    overrides: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[float | None] | None:
    """The new learning rate over the old one, for each group of the parent; None: none is new.

    The factor of a group whose rate is 0 is None: there is nothing that could go on relative to it.
    """
    changes = changes_by_group(overrides, groups)
    if not any("lr" in changed for changed in changes):
        return None
    factors: list[float | None] = []
    for changed, group in zip(changes, groups, strict=True):
        old = float(group["lr"])
        new = float(changed["lr"][1]) if "lr" in changed else old
        factors.append(1.0 if new == old else new / old if old else None)
    return factors


def apply_overrides(
    overrides: Mapping[str, Any], optimizer: torch.optim.Optimizer, schedulers: Iterable[Any]
) -> list[float | None] | None:
    """Change an optimizer and its schedulers, which have the parent's state; the rates' factors.

    Raises:
        ConfigError: a path leads nowhere, or a schedule cannot go on relative to the new rate.
    """
    from sapwood.clone import options, schedules

    groups = optimizer.param_groups
    factors = rate_factors(overrides, groups)
    found = list(schedulers)
    for scheduler in found:
        schedules.check(scheduler, None, factors)
    options.apply_changes(changes_by_group(overrides, groups), optimizer)
    if factors is not None:
        schedules.scale_groups(optimizer, factors)
        for scheduler in found:
            schedules.scale(scheduler, factors, groups)
    return factors


def _check_path(path: str) -> None:
    first, *rest = path.split(".")
    if first in _SCHEDULERS:
        raise ConfigError(
            f"{path}: a fork goes on with its parent's schedules. There is optimizer.lr, relative "
            "to which they go on; to change anything else of a schedule, let the script do it: "
            "`if run.forked_from: run.wait_ready()`, then set it with run.override('T_max', ...)"
        )
    if first == _OPTIMIZER:
        if len(rest) == 2 and rest[0].isdecimal():
            rest = rest[1:]
        if len(rest) != 1 or not rest[0] or rest[0] == "params":
            raise ConfigError(
                f"{path}: expected {_OPTIMIZER}.NAME for all parameter groups, or "
                f"{_OPTIMIZER}.0.NAME for one"
            )
        return
    for known in (_OPTIMIZER, *_SCHEDULERS):
        alike = difflib.SequenceMatcher(None, first.lower(), known).ratio() >= _ALIKE
        if alike and first not in _ITS_OWN_WORD:
            raise ConfigError(f"{path}: did you mean {'.'.join([known, *rest])}?")


def _check_value(path: str, name: str, value: Any) -> None:
    """Refuse what no optimizer of torch takes, and numbers that are none."""
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(one, float) and not math.isfinite(one) for one in numbers):
        raise ConfigError(f"{path} is {value!r}, expected a number")
    if name not in _NUMBERS:
        return
    if not all(one is None or _is_number(one) for one in numbers):
        raise ConfigError(f"{path} is {value!r}, expected a number")
    # Adafactor's eps is a pair, with None for "by itself".
    if name in _NOT_NEGATIVE and any(one is not None and one < 0 for one in numbers):
        raise ConfigError(f"{path} is {value!r}, expected a number, 0 or more")
    if name == "lr" and not _is_number(value):
        raise ConfigError(f"{path} is {value!r}, expected a number, 0 or more")
    if name == "betas" and not (len(numbers) == 2 and all(_is_share(one) for one in numbers)):
        raise ConfigError(f"{path} is {value!r}, expected two numbers below 1, as in [0.9,0.99]")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1
