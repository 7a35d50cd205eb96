"""Two models that train each other, each with its own Run: as a plain loop does, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sapwood
from sapwood.errors import SapwoodError
from sapwood.testing import ranks
from sapwood.testing.ranks import rank, world
from tests.sync import models

ADAM = {"lr": 1e-2}


def make() -> tuple[nn.Module, nn.Module]:
    generator = models.seeded(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), seed=1
    )
    critic = models.seeded(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2
    )
    return generator, critic


def data(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(4, 16, generator=source), torch.randn(4, 8, generator=source)


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if world() > 1 and parameter.grad is not None:
            parameter.grad.mul_(1.0 / world())
            dist.all_reduce(parameter.grad)


def plain(freeze: bool) -> list[Tensor]:
    generator, critic = make()
    first = torch.optim.Adam(generator.parameters(), **ADAM)
    second = torch.optim.Adam(critic.parameters(), **ADAM)
    for step in range(4):
        real, noise = data(step)
        second.zero_grad()
        (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
        average(critic)
        second.step()
        critic.requires_grad_(not freeze)
        first.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        average(generator)
        first.step()
        critic.requires_grad_(True)
    return models.weights(generator) + models.weights(critic)


def ours(freeze: bool, **settings: Any) -> list[Tensor]:
    generator, critic = make()
    first = torch.optim.Adam(generator.parameters(), **ADAM)
    second = torch.optim.Adam(critic.parameters(), **ADAM)
    options = {"timeout": 20.0, "first_bucket_mb": 1e-4, "bucket_mb": 1e-4, **settings}
    with (
        sapwood.Run(generator, first, **options) as makes,
        sapwood.Run(critic, second, **options) as judges,
    ):
        for step in range(4):
            real, noise = data(step)
            second.zero_grad()
            fake = makes.model(noise).detach()
            (judges.model(fake).mean() - judges.model(real).mean()).backward()
            judges.step()
            critic.requires_grad_(not freeze)
            first.zero_grad()
            (-judges.model(makes.model(noise)).mean()).backward()
            makes.step()
            critic.requires_grad_(True)
    return models.weights(generator) + models.weights(critic)


def compare(freeze: bool, settings: dict[str, Any]) -> str:
    expected = plain(freeze)
    try:
        return "same" if models.same(expected, ours(freeze, **settings)) else "differs"
    except SapwoodError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("settings", [{}, {"update": "deferred"}], ids=["layerwise", "deferred"])
@pytest.mark.parametrize("count", [1, 2])
def test_freezing_the_critic_around_the_generators_step_is_the_way(
    count: int, settings: dict[str, Any]
) -> None:
    found = ranks.spawn(compare, count, True, settings, init=count > 1, timeout=100)
    assert found == ["same"] * count


@pytest.mark.parametrize("settings", [{}, {"update": "deferred"}], ids=["layerwise", "deferred"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_critic_that_is_not_frozen_is_trained_right_or_refused(
    count: int, settings: dict[str, Any]
) -> None:
    for found in ranks.spawn(compare, count, False, settings, init=count > 1, timeout=100):
        assert found == "same" or "requires_grad_(False)" in found
