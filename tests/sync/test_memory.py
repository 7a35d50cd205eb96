"""What the engine keeps of forwards nobody back-propagates: nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}
ENGINE: list[dict[str, Any]] = [{}, {"update": "deferred"}]


class Activation:
    """Lives as long as the graph of the forward that made it."""


class Mark(torch.autograd.Function):
    made: list[weakref.ref[Activation]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.activation = Activation()
        Mark.made.append(weakref.ref(ctx.activation))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(Mark.apply(torch.tanh(self.first(x))))}


def alive() -> int:
    gc.collect()
    return sum(mark() is not None for mark in Mark.made)


def train_step(run: sapwood.Run, step: int) -> None:
    x, y = models.batch(step)
    models.loss_of(run.model(x)["logits"], y).backward()
    run.step()


@pytest.fixture(autouse=True)
def _fresh() -> object:
    Mark.made.clear()
    yield
    Mark.made.clear()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", ENGINE)
def test_forwards_before_the_first_backward_are_let_go(
    settings: dict[str, Any], training: bool
) -> None:
    model = models.seeded(Marked).train(training)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, **settings) as run:
        for step in range(8):
            run.model(models.batch(step)[0])
        assert alive() <= 1  # the last one may be what the plan is made from
        train_step(run, 0)
        assert alive() == 0


@pytest.mark.parametrize("settings", ENGINE)
def test_forwards_between_steps_are_let_go(settings: dict[str, Any]) -> None:
    model = models.seeded(Marked)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, **settings) as run:
        for step in range(4):
            train_step(run, step)
            run.model(models.batch(step)[0])
            assert alive() <= 1
        train_step(run, 4)
        assert alive() == 0


def test_forwards_while_accumulating_are_let_go() -> None:
    model = models.seeded(Marked)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        for step in range(3):
            with run.accumulate():
                run.model(models.batch(step)[0])
                x, y = models.batch(step)
                models.loss_of(run.model(x)["logits"], y).backward()
            train_step(run, step)
            assert alive() == 0


def test_thawing_and_a_forward_that_raises_keep_nothing() -> None:
    model = models.seeded(Marked)
    model.first.requires_grad_(False)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        train_step(run, 0)
        model.first.requires_grad_(True)
        for step in range(4):
            run.model(models.batch(step)[0])
        with pytest.raises(RuntimeError, match="shapes"):
            run.model(torch.zeros(2, 3))
        assert alive() <= 1
        train_step(run, 1)
        assert alive() == 0


def test_a_closed_run_keeps_nothing() -> None:
    model = models.seeded(Marked)
    run = sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD))
    run.model(models.batch(0)[0])
    run.close()
    assert alive() == 0
