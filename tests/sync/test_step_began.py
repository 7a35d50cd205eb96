"""The event that says that a step begins, and that nothing of it has changed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.events import StepBegan, StepEnded, TensorUpdated
from tests.sync import models


def forward_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Past the model's own forward, and so past the run's hooks on it."""
    inner = list(model.children())

    def forward(x: Tensor) -> Tensor:
        for module in inner:
            x = module(x)
        return x

    return forward


@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("around", [False, True], ids=["by the model", "around the model"])
def test_a_step_is_announced_once_before_anything_changes(update: Any, around: bool) -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[str, int]] = []
    with sapwood.Run(model, optimizer, update=update) as run:
        for kind in (StepBegan, TensorUpdated, StepEnded):
            run.events.subscribe(
                kind, lambda event: seen.append((type(event).__name__, event.step))
            )
        call = forward_of(model) if around else run.model
        for step in range(3):
            x, y = models.batch(step)
            with torch.no_grad():
                run.model(x)  # an evaluation
            assert not seen or seen[-1][0] == "StepEnded"
            with run.accumulate():
                models.loss_of(call(x), y).backward()
            models.loss_of(call(x), y).backward()
            run.step()
        run.step()  # without a backward
    for number in range(1, 5):
        names = [name for name, step in seen if step == number]
        assert (names[0], names[-1]) == ("StepBegan", "StepEnded")
        assert names.count("StepBegan") == 1
    assert [name for name, _ in seen].count("TensorUpdated") > 0
