"""Learning rates of a fork: its schedules are its parent's, times one factor per parameter group.

The factor is the new rate over the parent's rate at the forked step. All of torch's schedulers
compute rates from other rates, linearly: from the group's current one (``lr``), from what they keep
of the start (``base_lrs``, ``initial_lr``), and from bounds (``max_lr``, ``eta_min``). If each of
these is multiplied by the factor, then so is every rate that follows. So the new rate holds from
the first step and the schedule goes on relative to it, with no jump and no return to the old one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

from sapwood.errors import ConfigError

__all__ = [
    "OF_SCHEDULES",
    "RATES_OF",
    "Rates",
    "check",
    "check_drivers",
    "is_scheduler",
    "scale",
    "scale_groups",
]


class Rates(NamedTuple):
    """The attributes in which a scheduler keeps rates."""

    each: tuple[str, ...] = ("base_lrs",)
    """With one for each parameter group."""
    common: tuple[str, ...] = ()
    """With one for all groups."""


RATES_OF: Mapping[type, Rates] = {
    torchs.LambdaLR: Rates(),
    torchs.MultiplicativeLR: Rates(),
    torchs.StepLR: Rates(),
    torchs.MultiStepLR: Rates(),
    torchs.ConstantLR: Rates(),
    torchs.LinearLR: Rates(),
    torchs.ExponentialLR: Rates(),
    torchs.PolynomialLR: Rates(),
    torchs.CosineAnnealingLR: Rates(common=("eta_min",)),
    torchs.CosineAnnealingWarmRestarts: Rates(common=("eta_min",)),
    torchs.CyclicLR: Rates(each=("base_lrs", "max_lrs")),
    torchs.OneCycleLR: Rates(),  # the others are in the optimizer's groups
    torchs.ReduceLROnPlateau: Rates(each=("min_lrs",)),
    torchs.SequentialLR: Rates(each=()),
    torchs.ChainedScheduler: Rates(each=()),
    SWALR: Rates(),
}
"""Every scheduler whose rates are known here, by its exact class: a subclass may keep others."""

_IN_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Rates that schedulers keep in the optimizer's groups."""
OF_SCHEDULES = frozenset({*_IN_GROUPS, "base_momentum", "max_momentum"})
"""What schedulers keep in the optimizer's groups."""
_HOOK = "scale_rates"


def is_scheduler(thing: object, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this sets the learning rates of ``optimizer``."""
    return getattr(thing, "optimizer", None) is optimizer and callable(getattr(thing, "step", None))


def check_drivers(
    changes: Sequence[Mapping[str, tuple[str, Any]]], schedulers: Iterable[Any]
) -> None:
    """See that schedulers let changed options be; those of a rate must be of a known class.

    Raises:
        ConfigError: one would undo a change.
    """
    changed = {name: path for group in changes for name, (path, _) in group.items()}
    for scheduler in schedulers:
        if "lr" in changed:
            check(scheduler, None, ())
        for one in _all_in(scheduler):
            for name in ("momentum", "betas"):
                if name in changed and getattr(one, "cycle_momentum", False):
                    raise ConfigError(
                        f"{changed[name]} would be lost: {type(one).__name__} sets {name} at each "
                        "step; make the scheduler with cycle_momentum=False, or leave it as it is"
                    )


def check(
    scheduler: Any, state: Mapping[str, Any] | None, factors: Sequence[float | None] | None
) -> None:
    """See that a schedule can go on relative to new rates.

    ``state`` is what the scheduler will be given, None if it has it already; without ``factors``
    no rate changes, and if they are empty they are not known yet.

    Raises:
        ConfigError: its class is not known, the old rate is 0, or it has one bound for groups that
            go different ways.
    """
    if factors is None:
        return
    kind = type(scheduler).__name__
    if None in factors:
        raise ConfigError(
            f"optimizer.lr: the run's rate is 0 at this step, so that {kind} cannot go on relative "
            "to another one; fork it at another step"
        )
    if callable(getattr(scheduler, _HOOK, None)):
        return
    rates = RATES_OF.get(type(scheduler))
    if rates is None:
        raise ConfigError(
            f"optimizer.lr cannot be changed: {kind} is none of torch's own schedulers, and what "
            f"it computes rates from is not known. Give it a method {_HOOK}(factors), which "
            "multiplies all rates it keeps by the factor of their parameter group"
        )
    held = vars(scheduler) if state is None else state
    for name in rates.common:
        if held.get(name) and not _alike(factors):
            raise ConfigError(
                f"optimizer.lr: {kind} has one {name} ({held[name]:g}) for all parameter groups, "
                f"but their rates change by different factors ({_said(factors)}); change all "
                "groups alike, with optimizer.0.lr and so on"
            )
    inner = _inner(scheduler)
    states = [None] * len(inner) if state is None else state.get("_schedulers", ())
    for one, given in zip(inner, states, strict=True):
        check(one, given, factors)


def scale_groups(optimizer: torch.optim.Optimizer, factors: Sequence[float | None]) -> None:
    """Multiply what schedulers keep in the groups; ``lr`` itself has its new value already."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name in _IN_GROUPS:
            if name in group and name not in optimizer.defaults and factor not in (None, 1.0):
                group[name] = group[name] * factor


def scale(
    scheduler: Any, factors: Sequence[float | None], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Multiply the rates a scheduler keeps; ``groups`` have theirs already."""
    known = [1.0 if factor is None else factor for factor in factors]
    hook = getattr(scheduler, _HOOK, None)
    if callable(hook):
        hook(known)
        return
    rates = RATES_OF[type(scheduler)]
    # New lists: a scheduler and one inside it may share theirs.
    for name in rates.each:
        held = getattr(scheduler, name)
        setattr(scheduler, name, [_times(v, f) for v, f in zip(held, known, strict=False)])
    for name in rates.common:
        setattr(scheduler, name, _times(getattr(scheduler, name), known[0]))
    if isinstance(scheduler, torchs.ReduceLROnPlateau) and _alike(known):
        default = scheduler.default_min_lr  # for groups that are added later
        scheduler.default_min_lr = None if default is None else _times(default, known[0])
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [_copy(group["lr"]) for group in groups]
    for one in _inner(scheduler):
        scale(one, factors, groups)


def _times(value: Any, factor: float) -> Any:
    return value if factor == 1.0 else value * factor


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _inner(scheduler: Any) -> Sequence[Any]:
    return list(getattr(scheduler, "_schedulers", ()))


def _all_in(scheduler: Any) -> list[Any]:
    return [scheduler, *(found for one in _inner(scheduler) for found in _all_in(one))]


def _alike(factors: Sequence[float | None]) -> bool:
    known = [factor for factor in factors if factor is not None]
    return not known or all(math.isclose(f, known[0], rel_tol=1e-9) for f in known)


def _said(factors: Sequence[float | None]) -> str:
    return ", ".join("none" if factor is None else f"{factor:g}" for factor in factors)
