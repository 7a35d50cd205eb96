"""Restoring into an optimizer or schedulers of other classes, or into other parameter groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sapwood
from sapwood.errors import CheckpointError

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Schedulers = Callable[[torch.optim.Optimizer], list[Any]]


class Momentum(torch.optim.Optimizer):
    """Has no option that AdamW lacks, and a state AdamW does not have."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    kept = state.setdefault("kept", torch.zeros_like(p))
                    p.add_(kept.add_(p.grad), alpha=-group["lr"])


class Subclass(torch.optim.AdamW):
    """As its base class."""


def adam_of(kind: type, **options: Any) -> Optimizers:
    return lambda model: kind(model.parameters(), lr=0.1, **options)


def grouped(*, swapped: bool = False, fewer: bool = False) -> Optimizers:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        some = list(model.parameters())[: 2 if fewer else None]
        groups = [
            {"params": [p for p in some if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in some if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.1)

    return make


class Case:
    """A small training that saves into, or restores from, a folder."""

    def __init__(
        self,
        folder: Path,
        optimizer: Optimizers,
        schedulers: Schedulers = lambda _: [],
        shared: Schedulers = lambda _: [],
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = optimizer(self.model)
        self.run = sapwood.Run(
            self.model,
            self.optimizer,
            folder=folder / "runs",
            schedulers=schedulers(self.optimizer),
        )
        named = {f"mine {n}": one for n, one in enumerate(shared(self.optimizer))}
        self.ckpt = sapwood.Checkpointer(self.run, folder / "c", engine="sync", shared=named)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.run.model(torch.randn(2, 4)).pow(2).mean().backward()
            self.run.step()

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()
        self.run.close()


def save(folder: Path, *how: Any, **more: Any) -> None:
    with Case(folder, *how, **more) as one:
        one.steps(3)
        one.ckpt.save()


def refused(folder: Path, match: str, *how: Any, **more: Any) -> None:
    with Case(folder, *how, **more) as other:
        weights = [p.detach().clone() for p in other.model.parameters()]
        with pytest.raises(CheckpointError, match=match):
            other.ckpt.restore_latest()
        assert all(
            torch.equal(a, b) for a, b in zip(weights, other.model.parameters(), strict=True)
        )
        assert other.run.step_count == 0


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (torch.optim.AdamW, torch.optim.Adam),  # it would go on as AdamW
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.NAdam, torch.optim.RAdam),
        (torch.optim.Adam, torch.optim.Adamax),  # it would fail in the next step
        (torch.optim.AdamW, Momentum),
        (Subclass, torch.optim.AdamW),
    ],
)
def test_another_optimizer_with_the_same_options_is_refused(
    tmp_path: Path, saved: type, here: type
) -> None:
    save(tmp_path, adam_of(saved))
    match = f"the optimizer is {here.__name__}, the checkpoint's {saved.__name__}"
    refused(tmp_path, match, adam_of(here))
    with Case(tmp_path, adam_of(here)) as other:
        assert other.ckpt.restore_latest(optimizer=False) is not None
        other.steps(1)


def test_a_subclass_made_later_goes_on(tmp_path: Path) -> None:
    save(tmp_path, adam_of(torch.optim.AdamW))
    with Case(tmp_path, adam_of(Subclass)) as other:
        assert other.ckpt.restore_latest() is not None
        assert other.optimizer.state[other.model[0].weight]["step"] == 3
        other.steps(1)


def test_parameters_in_other_groups_are_refused(tmp_path: Path) -> None:
    save(tmp_path, grouped())
    refused(
        tmp_path, r"0\.weight is in group 1, in the checkpoint in group 0", grouped(swapped=True)
    )
    with Case(tmp_path, grouped()) as same:
        assert same.ckpt.restore_latest() is not None


@pytest.mark.parametrize("fewer_at_first", [True, False])
def test_parameters_the_optimizer_did_not_hold_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fewer_at_first: bool
) -> None:
    save(tmp_path, grouped(fewer=fewer_at_first))
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, "sapwood"),
        Case(tmp_path, grouped(fewer=not fewer_at_first)) as other,
    ):
        assert other.ckpt.restore_latest() is not None
    said = [r.getMessage() for r in caplog.records if "optimizer" in r.getMessage()]
    word = "begin without a state" if fewer_at_first else "is dropped"
    assert any(word in line and "1.weight" in line for line in said), said


@pytest.mark.parametrize("shared", [False, True])
def test_a_scheduler_of_another_class_is_refused(tmp_path: Path, shared: bool) -> None:
    def where(make: Schedulers) -> dict[str, Schedulers]:
        return {"shared" if shared else "schedulers": make}

    sgd = adam_of(torch.optim.SGD)
    save(tmp_path, sgd, **where(lambda o: [lr_scheduler.CosineAnnealingLR(o, 10)]))
    for make, name in (
        (lambda o: [lr_scheduler.StepLR(o, 2)], "StepLR"),
        (lambda o: [lr_scheduler.OneCycleLR(o, 0.1, 20)], "OneCycleLR"),
        (
            lambda o: [lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2)])],
            "ChainedScheduler",
        ),
    ):
        match = rf"0 is a {name}.*, the checkpoint's a CosineAnnealingLR"
        refused(tmp_path, match, sgd, **where(make))
    with Case(tmp_path, sgd, **where(lambda o: [lr_scheduler.CosineAnnealingLR(o, 10)])) as same:
        assert same.ckpt.restore_latest() is not None


def test_schedulers_inside_a_scheduler_count(tmp_path: Path) -> None:
    def sequence(*kinds: Any) -> Schedulers:
        return lambda o: [
            lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), kinds[0](o, 5)], [3])
        ]

    sgd = adam_of(torch.optim.SGD)
    save(tmp_path, sgd, sequence(lr_scheduler.CosineAnnealingLR))
    match = r"SequentialLR\(ConstantLR, StepLR\), the checkpoint's a SequentialLR\(ConstantLR, Cos"
    refused(tmp_path, match, sgd, sequence(lr_scheduler.StepLR))
