"""A new learning rate in a fork: every schedule of torch goes on relative to it.

The reference is a training with the same schedule that had scaled rates from its start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

from sapwood.clone.overrides import apply_overrides, check_overrides, rate_factors
from sapwood.clone.schedules import RATES_OF, check
from sapwood.errors import ConfigError
from sapwood.state.plain import from_plain, to_plain

SHARE = pytest.approx
FUTURE = 25
Make = Callable[[torch.optim.Optimizer, Sequence[float]], Any]


def wave(epoch: int) -> float:
    return 1.0 / (1 + epoch % 5)


class Warmup:
    """A callable object, whose state a LambdaLR keeps."""

    def __init__(self) -> None:
        self.steps = 6

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


def sequential(optimizer: torch.optim.Optimizer, f: Sequence[float]) -> Any:
    parts = [
        torchs.LinearLR(optimizer, 0.1, total_iters=6),
        torchs.CosineAnnealingLR(optimizer, 8, eta_min=1e-3 * f[0]),
        torchs.StepLR(optimizer, 3, 0.5),
    ]
    return torchs.SequentialLR(optimizer, parts, [6, 14])


def restarted(optimizer: torch.optim.Optimizer, f: Sequence[float]) -> Any:
    parts = [
        torchs.ConstantLR(optimizer, 0.5, 20),
        torchs.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=1e-3 * f[0]),
    ]
    return torchs.SequentialLR(optimizer, parts, [9])


def chained(optimizer: torch.optim.Optimizer, f: Sequence[float]) -> Any:
    parts = [torchs.ConstantLR(optimizer, 0.5, 8), torchs.ExponentialLR(optimizer, 0.9)]
    return torchs.ChainedScheduler(parts, optimizer)


def cyclic(mode: Any) -> Make:
    return lambda o, f: torchs.CyclicLR(
        o,
        [0.01 * one for one in f],
        [0.1 * one for one in f],
        step_size_up=4,
        step_size_down=3,
        mode=mode,
        gamma=0.95,
    )


def one_cycle(**options: Any) -> Make:
    return lambda o, f: torchs.OneCycleLR(o, [0.3 * one for one in f], total_steps=60, **options)


SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o, f: torchs.LambdaLR(o, wave),
    "LambdaLR with objects": lambda o, f: torchs.LambdaLR(o, [Warmup(), Warmup()]),
    "MultiplicativeLR": lambda o, f: torchs.MultiplicativeLR(o, lambda epoch: 0.93),
    "StepLR": lambda o, f: torchs.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o, f: torchs.MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "ConstantLR": lambda o, f: torchs.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o, f: torchs.LinearLR(o, 0.2, 0.9, 11),
    "ExponentialLR": lambda o, f: torchs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o, f: torchs.PolynomialLR(o, 15, 2.0),
    "CosineAnnealingLR": lambda o, f: torchs.CosineAnnealingLR(o, 10, eta_min=1e-3 * f[0]),
    "CosineAnnealingWarmRestarts": lambda o, f: torchs.CosineAnnealingWarmRestarts(
        o, 3, 2, eta_min=1e-3 * f[0]
    ),
    "CyclicLR": cyclic("triangular"),
    "CyclicLR triangular2": cyclic("triangular2"),
    "CyclicLR exp_range": cyclic("exp_range"),
    "OneCycleLR": one_cycle(),
    "OneCycleLR in three phases": one_cycle(three_phase=True, anneal_strategy="linear"),
    "ReduceLROnPlateau": lambda o, f: torchs.ReduceLROnPlateau(
        o, patience=1, factor=0.5, min_lr=[1e-3 * one for one in f]
    ),
    "ReduceLROnPlateau, one bound": lambda o, f: torchs.ReduceLROnPlateau(
        o, patience=1, factor=0.5, min_lr=1e-3 * f[0]
    ),
    "SequentialLR": sequential,
    "SequentialLR with restarts": restarted,
    "ChainedScheduler": chained,
    "SWALR": lambda o, f: SWALR(o, [0.05 * one for one in f], 8, "cos"),
    "SWALR, linear": lambda o, f: SWALR(o, [0.05 * one for one in f], 8, "linear"),
}
ONE_BOUND = ("CosineAnnealing", "one bound", "Sequential")
"""These have one bound for all groups."""


def optimizer_with(factors: Sequence[float], *, tensor: bool = False) -> torch.optim.Optimizer:
    rates: list[Any] = [0.1 * factors[0], 0.02 * factors[1]]
    if tensor:
        rates = [torch.tensor(rate, dtype=torch.float64) for rate in rates]
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, momentum=0.9)


def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    """One step; the rates and momenta that the next one trains with."""
    optimizer.step()
    if isinstance(scheduler, torchs.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()
    return values(optimizer)


def values(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [float(g[name]) for g in optimizer.param_groups for name in ("lr", "momentum")]


def begin(make: Make, factors: Sequence[float], steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = optimizer_with(factors)
    scheduler = make(optimizer, factors)
    for _ in range(steps):
        step(optimizer, scheduler)
    return optimizer, scheduler


def forked(make: Make, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """The same in another process: made anew, and given its parent's state, as it travels."""
    parent, theirs = begin(make, (1.0, 1.0), steps)
    clone, ours = begin(make, (1.0, 1.0), 0)
    for here, there in zip(clone.param_groups, parent.param_groups, strict=True):
        here.update(travelled({k: v for k, v in there.items() if k != "params"}))
    ours.load_state_dict(travelled(theirs.state_dict()))
    return clone, ours


def travelled(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value, "state"))))


def test_every_scheduler_of_torch_has_its_rule() -> None:
    names = set(torchs.__all__) - {"LRScheduler"}
    assert set(RATES_OF) == {getattr(torchs, name) for name in names} | {SWALR}
    tested = {name.partition(",")[0].partition(" ")[0] for name in SCHEDULES}
    assert tested == names | {"SWALR"}


@pytest.mark.parametrize("travels", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 4, 7])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_relative_to_the_new_rate(name: str, steps: int, travels: bool) -> None:
    make = SCHEDULES[name]
    factors = (0.3, 0.3 if any(word in name for word in ONE_BOUND) else 3.0)
    optimizer, scheduler = forked(make, steps) if travels else begin(make, (1.0, 1.0), steps)
    twin, reference = begin(make, factors, steps)
    wanted = [g["lr"] * f for g, f in zip(optimizer.param_groups, factors, strict=True)]
    overrides = {f"optimizer.{n}.lr": rate for n, rate in enumerate(wanted)}
    apply_overrides(overrides, optimizer, [scheduler])
    assert [g["lr"] for g in optimizer.param_groups] == wanted, "from the first step on"
    assert scheduler.get_last_lr() == wanted
    assert values(optimizer) == SHARE(values(twin), rel=1e-9)
    for _ in range(FUTURE):
        assert step(optimizer, scheduler) == SHARE(step(twin, reference), rel=1e-9, abs=1e-18)
    if hasattr(scheduler, "_get_closed_form_lr"):
        assert scheduler._get_closed_form_lr() == SHARE(reference._get_closed_form_lr(), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_rate_again_changes_no_bit(name: str) -> None:
    optimizer, scheduler = begin(SCHEDULES[name], (1.0, 1.0), 4)
    twin, reference = begin(SCHEDULES[name], (1.0, 1.0), 4)
    rates = [g["lr"] for g in optimizer.param_groups]
    apply_overrides({f"optimizer.{n}.lr": r for n, r in enumerate(rates)}, optimizer, [scheduler])
    for _ in range(FUTURE):
        assert step(optimizer, scheduler) == step(twin, reference)


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    optimizer = optimizer_with((1.0, 1.0), tensor=True)
    scheduler = torchs.LambdaLR(optimizer, wave)
    tensors = [g["lr"] for g in optimizer.param_groups]
    apply_overrides({"optimizer.lr": 0.5}, optimizer, [scheduler])
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert all(g["lr"] is t for g, t in zip(optimizer.param_groups, tensors, strict=True))
    step(optimizer, scheduler)
    assert values(optimizer)[::2] == SHARE([0.25, 0.25])


def test_a_group_s_own_path_wins_over_the_one_for_all() -> None:
    for paths in (("optimizer.1.lr", "optimizer.lr"), ("optimizer.lr", "optimizer.1.lr")):
        optimizer, scheduler = begin(SCHEDULES["StepLR"], (1.0, 1.0), 1)
        chosen = {"optimizer.lr": 0.5, "optimizer.1.lr": 0.25}
        apply_overrides({path: chosen[path] for path in paths}, optimizer, [scheduler])
        assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]


# -- what cannot be done ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SCHEDULES if "Annealing" in n or "Sequential" in n])
def test_one_bound_for_groups_that_part_is_refused(name: str) -> None:
    optimizer, scheduler = begin(SCHEDULES[name], (1.0, 1.0), 3)
    before = values(optimizer)
    with pytest.raises(ConfigError, match=r"has one eta_min \(0.001\) for all parameter groups"):
        apply_overrides({"optimizer.1.lr": 0.5}, optimizer, [scheduler])
    assert values(optimizer) == before
    factors = rate_factors({"optimizer.1.lr": 0.5}, optimizer.param_groups)
    fresh = SCHEDULES[name](optimizer_with((1.0, 1.0)), (0.0, 0.0))
    with pytest.raises(ConfigError, match="eta_min"):  # known from the state alone
        check(fresh, travelled(scheduler.state_dict()), factors)
    check(fresh, None, factors)


def test_a_rate_of_zero_has_nothing_to_go_on_from() -> None:
    optimizer = optimizer_with((1.0, 1.0))
    scheduler = torchs.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 5))
    with pytest.raises(ConfigError, match="rate is 0 at this step"):
        apply_overrides({"optimizer.lr": 0.5}, optimizer, [scheduler])
    assert values(optimizer)[::2] == [0.0, 0.0]
    apply_overrides({"optimizer.lr": 0.5}, optimizer, [])  # nothing is relative to it
    assert values(optimizer)[::2] == [0.5, 0.5]


class Cubic(torchs.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.top = 0.3
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [self.top * 0.9**self.last_epoch for _ in self.optimizer.param_groups]


class Scalable(Cubic):
    def scale_rates(self, factors: list[float]) -> None:
        self.top *= factors[0]


class Derived(torchs.StepLR):
    """It may keep rates that nobody knows of."""


@pytest.mark.parametrize("inside", [False, True])
def test_a_scheduler_of_another_class_is_refused_unless_it_can_be_told(inside: bool) -> None:
    def check_with(kind: Any, *args: Any) -> None:
        optimizer = optimizer_with((1.0, 1.0))
        scheduler: Any = kind(optimizer, *args)
        if inside:
            scheduler = torchs.ChainedScheduler([scheduler], optimizer)
        check_overrides({"optimizer.weight_decay": 0.1}, optimizer, [scheduler])
        check_overrides({"optimizer.lr": 0.1}, optimizer, [scheduler])

    with pytest.raises(ConfigError, match=r"Cubic is none of torch's own.*scale_rates"):
        check_with(Cubic)
    with pytest.raises(ConfigError, match="Derived is none of torch's own"):
        check_with(Derived, 3)
    check_with(Scalable)


def test_a_scheduler_s_own_way_to_scale_is_used() -> None:
    optimizer = optimizer_with((1.0, 1.0))
    scheduler = Scalable(optimizer)
    apply_overrides({"optimizer.lr": 0.6}, optimizer, [scheduler])
    assert values(optimizer)[::2] == [0.6, 0.6]
    step(optimizer, scheduler)
    assert values(optimizer)[::2] == SHARE([0.54, 0.54])


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_a_momentum_that_the_schedule_sets_is_refused(name: str) -> None:
    optimizer, scheduler = begin(SCHEDULES[name], (1.0, 1.0), 2)
    with pytest.raises(ConfigError, match=rf"momentum would be lost: {name} sets momentum"):
        check_overrides({"optimizer.momentum": 0.5}, optimizer, [scheduler])
    with pytest.raises(ConfigError, match=r"optimizer.max_momentum is a scheduler's"):
        check_overrides({"optimizer.max_momentum": 0.5}, optimizer, [scheduler])
