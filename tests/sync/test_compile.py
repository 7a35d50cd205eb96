"""torch.compile: the compiled model trains under a Run as it does under a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sapwood
from sapwood.errors import UsageError
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}


def whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def a_part(model: nn.Module, backend: str) -> nn.Module:
    model[0] = torch.compile(model[0], backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "whole": whole,
    "in place": in_place,
    "a part": a_part,
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> object:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_plain_loop_on_the_same_compiled_model(way: str) -> None:
    plain, ours = (WAYS[way](models.mlp(), "aot_eager") for _ in range(2))
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 4)
    with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD)) as run:
        assert [models.train_run_step(run, s)[0] for s in range(4)] == expected
        names = {name for bucket in run.buckets for name in bucket}
        assert names == {name for name, _ in models.mlp().named_parameters()}
    assert models.same(models.weights(plain), models.weights(ours))


def test_compiled_after_the_run_was_made() -> None:
    plain, ours = models.mlp(), models.mlp()
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 3)
    losses = []
    with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD)) as run:
        compiled = torch.compile(run.model, backend="aot_eager")
        for step in range(3):
            x, y = models.batch(step)
            loss = models.loss_of(compiled(x), y)
            loss.backward()
            run.step()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)


def inductor() -> tuple[list[float], int]:
    model = torch.compile(models.mlp(layers=1))
    losses = []
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        for step in range(3):
            x, y = models.batch(step, rank())
            loss = models.loss_of(run.model(x), y)
            loss.backward()
            run.step()
            losses.append(sum(p.double().sum().item() for p in model.parameters()))
        return losses, run.stats.plans


def test_inductor_on_two_ranks() -> None:
    first, second = ranks.spawn(inductor, 2, timeout=110)
    assert first == second
    assert first[1] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not")  # torch's
def test_compiled_autograd_is_refused_by_name() -> None:
    """Its enabled backward is traced: hooks see no gradient task, and callbacks are not called."""
    from torch._dynamo import compiled_autograd

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = [p.detach().clone() for p in model.parameters()]
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        loss = run.model(torch.ones(2, 3)).sum()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(UsageError, match=r"compiled autograd.*config\.compiled_autograd off"),
        ):
            loss.backward()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
