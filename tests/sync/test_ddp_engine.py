"""engine="ddp": what DDP itself gets wrong or leaves out must not reach the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


# -- found by running other people's models ----------------------------------------------------


def train_some(engine: str) -> list[float]:
    """The optimizer has the last layer alone, as Muon has the matrices alone."""
    model = models.mlp()
    last = list(model.parameters())[-2:]
    optimizer = torch.optim.SGD(last, **SGD)
    with sapwood.Run(model, optimizer, engine=engine, timeout=10.0) as run:
        for step in range(3):
            models.train_run_step(run, step)
    return [parameter.detach().sum().item() for parameter in model.parameters()]


def test_an_optimizer_may_have_some_of_the_parameters() -> None:
    ddp, layerwise = (ranks.spawn(train_some, 2, e, timeout=60) for e in ("ddp", "layerwise"))
    assert ddp == layerwise


def sparse() -> str:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    with sapwood.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), engine="ddp", timeout=10.0
    ) as run:
        run.model(torch.tensor([1, 2])).sum().backward()
        run.step()
    return ""


def test_a_sparse_gradient_is_refused_as_by_the_other_engine() -> None:
    for outcome in ranks.spawn(sparse, 2, expect_errors=True, timeout=60):
        assert outcome.error_type in {"UsageError", "PeerFailed"}, outcome.describe()
        assert "sparse=False" in str(outcome.error)


def leaves() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, engine="ddp", timeout=10.0) as run:
        for step in range(1 + 2 * (1 - rank())):
            models.train_run_step(run, step)


def test_a_rank_that_left_is_named_by_the_error_that_the_docs_promise() -> None:
    first, second = ranks.spawn(leaves, 2, expect_errors=True, timeout=60)
    assert first.error_type == "PeerFailed", first.describe()
    assert "rank 1" in str(first.error)
    assert second.ok
