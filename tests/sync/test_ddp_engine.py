"""engine="ddp": what DDP itself gets wrong or leaves out must not reach the user."""

from __future__ import annotations

import pytest
import torch

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}


def validate_on_rank0(training: bool) -> list[float]:
    model = models.seeded(models.Norms)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, engine="ddp", timeout=10.0) as run:
        for step in range(3):
            models.train_run_step(run, step)
            if rank() == 0:
                run.model.train(training)
                with torch.no_grad():
                    losses.append(run.model(models.batch(step)[0]).sum().item())
                run.model.train()
    return losses


@pytest.mark.parametrize("training", [False, True])
def test_rank_0_may_look_at_the_model_alone_or_is_told_that_it_may_not(training: bool) -> None:
    """DDP sends buffers in every forward, so a forward on one rank only would hang or abort."""
    outcomes = ranks.spawn(validate_on_rank0, 2, training, expect_errors=True, timeout=60)
    for outcome in outcomes:
        assert outcome.signal is None, outcome.describe()
        assert outcome.error_type in {None, "UsageError", "ConfigError", "PeerFailed"}
    if not outcomes[0].ok:
        assert outcomes[0].error_type in {"UsageError", "ConfigError"}, outcomes[0].error


def hooks() -> list[str]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with sapwood.Run(model, optimizer, engine="ddp", timeout=10.0) as run:
        for step in range(2):
            models.train_run_step(run, step)
    return calls


def test_step_hooks_of_the_user_are_run_once_a_step() -> None:
    assert ranks.spawn(hooks, 2, timeout=60) == [["after", "after"]] * 2
