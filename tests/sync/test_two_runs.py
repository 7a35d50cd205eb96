"""Two Runs in one process: a GAN's two halves, and two models trained by one backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.errors import UsageError
from sapwood.testing import ranks
from sapwood.testing.ranks import rank, world
from tests.sync import models

ADAM = {"lr": 2e-3, "betas": (0.5, 0.999)}
STEPS = 5


def generator() -> nn.Module:
    return models.seeded(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)), 1
    )


def discriminator(*, norm: bool = False) -> nn.Module:
    middle = nn.BatchNorm1d(32) if norm else nn.Identity()
    return models.seeded(
        lambda: nn.Sequential(nn.Linear(16, 32), middle, nn.LeakyReLU(0.2), nn.Linear(32, 1)), 2
    )


def drawn(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + rank())
    return torch.randn(8, 16, generator=chance), torch.randn(8, 8, generator=chance)


def d_loss(d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    one, zero = torch.ones(8, 1), torch.zeros(8, 1)
    bce = F.binary_cross_entropy_with_logits
    return bce(d(real), one) + bce(d(fake.detach()), zero)


def g_loss(d: nn.Module, fake: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(d(fake), torch.ones(8, 1))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


def plain_gan() -> tuple[nn.Module, nn.Module]:
    """DCGAN's loop, under DistributedDataParallel where there are ranks.

    The discriminator's gradients of the generator's step are thrown away by the next zero_grad().
    """
    g, d = generator(), discriminator()
    opt_g = torch.optim.Adam(g.parameters(), **ADAM)
    opt_d = torch.optim.Adam(d.parameters(), **ADAM)
    on_ranks = world() > 1
    wrapped_g = DistributedDataParallel(g) if on_ranks else g
    wrapped_d = DistributedDataParallel(d, broadcast_buffers=False) if on_ranks else d
    for step in range(STEPS):
        real, noise = drawn(step)
        opt_d.zero_grad()
        fake = wrapped_g(noise)
        # One forward: DistributedDataParallel averages the gradients of one.
        both = wrapped_d(torch.cat([real, fake.detach()]))
        target = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        F.binary_cross_entropy_with_logits(both, target).backward()
        opt_d.step()
        opt_g.zero_grad()
        g_loss(wrapped_d, fake).backward()
        opt_g.step()
    return g, d


def our_gan(settings: dict[str, Any]) -> dict[str, Any]:
    expected = plain_gan()
    g, d = generator(), discriminator()
    opt_g = torch.optim.Adam(g.parameters(), **ADAM)
    opt_d = torch.optim.Adam(d.parameters(), **ADAM)
    with (
        sapwood.Run(d, opt_d, timeout=30.0, **settings) as run_d,
        sapwood.Run(g, opt_g, timeout=30.0, **settings) as run_g,
    ):
        for step in range(STEPS):
            real, noise = drawn(step)
            fake = run_g.model(noise)
            both = run_d.model(torch.cat([real, fake.detach()]))
            target = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
            F.binary_cross_entropy_with_logits(both, target).backward()
            run_d.step()
            with frozen(d):
                g_loss(run_d.model, fake).backward()
            run_g.step()
        return {
            "d": models.same(models.weights(expected[1]), models.weights(d)),
            "g": models.same(models.weights(expected[0]), models.weights(g)),
            "plans": (run_d.stats.plans, run_g.stats.plans),
            "steps": (run_d.step_count, run_g.step_count),
        }


MODES: dict[str, dict[str, Any]] = {
    "layerwise": {},
    "deferred": {"update": "deferred"},
    "ddp": {"engine": "ddp"},
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["layerwise", "deferred"])
def test_a_gan_is_as_with_ddp(mode: str, count: int) -> None:
    for facts in ranks.spawn(our_gan, count, MODES[mode], init=count > 1, timeout=100):
        assert facts["d"]
        assert facts["g"]
        assert facts["plans"] == (1, 1)
        assert facts["steps"] == (STEPS, STEPS)


def test_a_gan_with_engine_ddp() -> None:
    for facts in ranks.spawn(our_gan, 2, MODES["ddp"], init=True, timeout=100):
        assert facts["d"]
        assert facts["g"]


def generator_first() -> dict[str, Any]:
    """The discriminator is called, frozen, before it was ever trained; it has BatchNorm too."""
    g, d = generator(), discriminator(norm=True)
    with (
        sapwood.Run(d, torch.optim.Adam(d.parameters(), **ADAM), timeout=30.0) as run_d,
        sapwood.Run(g, torch.optim.Adam(g.parameters(), **ADAM), timeout=30.0) as run_g,
    ):
        for step in range(3):
            real, noise = drawn(step)
            fake = run_g.model(noise)
            before = models.weights(d)
            with frozen(d):
                g_loss(run_d.model, fake).backward()
            run_g.step()
            untouched = models.same(before, models.weights(d))
            d_loss(run_d.model, real, fake).backward()
            run_d.step()
        return {
            "untouched": untouched,
            "trained": not models.same(before, models.weights(d)),
            "plans": (run_d.stats.plans, run_g.stats.plans),
            "sum": [p.double().sum().item() for p in (*g.parameters(), *d.parameters())],
        }


@pytest.mark.parametrize("count", [1, 2])
def test_the_generator_may_come_first(count: int) -> None:
    facts = ranks.spawn(generator_first, count, timeout=100)
    assert all(one == facts[0] for one in facts)
    assert facts[0]["untouched"]
    assert facts[0]["trained"]
    assert facts[0]["plans"] == (1, 1)


def forgotten_freeze() -> str:
    g, d = generator(), discriminator()
    with (
        sapwood.Run(d, torch.optim.Adam(d.parameters(), **ADAM), timeout=30.0) as run_d,
        sapwood.Run(g, torch.optim.Adam(g.parameters(), **ADAM), timeout=30.0) as run_g,
    ):
        for step in range(2):
            real, noise = drawn(step)
            fake = run_g.model(noise)
            d_loss(run_d.model, real, fake).backward()
            run_d.step()
            g_loss(run_d.model, fake).backward()
            run_g.step()
    return "nothing was said"


@pytest.mark.parametrize("count", [1, 2])
def test_a_generators_backward_through_the_discriminator_is_refused(count: int) -> None:
    for outcome in ranks.spawn(forgotten_freeze, count, expect_errors=True, timeout=100):
        assert outcome.error_type in ("UsageError", "PeerFailed"), outcome.error
        assert "requires_grad_(False)" in outcome.error


def one_backward() -> list[float]:
    """Encoder and decoder with an optimizer and a Run each, and one loss."""
    encoder, decoder = models.mlp(layers=1), models.seeded(lambda: nn.Linear(4, 4), 3)
    plain = models.mlp(layers=1), models.seeded(lambda: nn.Linear(4, 4), 3)
    wrapped = [DistributedDataParallel(m) if world() > 1 else m for m in plain]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain]
    for step in range(3):
        x, y = models.batch(step, rank())
        models.loss_of(wrapped[1](wrapped[0](x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with (
        sapwood.Run(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1)) as first,
        sapwood.Run(decoder, torch.optim.SGD(decoder.parameters(), lr=0.1)) as second,
    ):
        for step in range(3):
            x, y = models.batch(step, rank())
            models.loss_of(second.model(first.model(x)), y).backward()
            first.step()
            second.step()
        pairs = zip(plain, (encoder, decoder), strict=True)
        return [models.same(models.weights(a), models.weights(b)) for a, b in pairs]


@pytest.mark.parametrize("count", [1, 2])
def test_two_runs_of_one_backward(count: int) -> None:
    for facts in ranks.spawn(one_backward, count, init=count > 1, timeout=100):
        assert facts == [True, True]


def first_closes_first() -> list[float]:
    one, two = models.mlp(), models.mlp()
    first = sapwood.Run(one, torch.optim.SGD(one.parameters(), lr=0.1), timeout=30.0)
    second = sapwood.Run(two, torch.optim.SGD(two.parameters(), lr=0.1), timeout=30.0)
    models.train_run_step(first, 0)
    first.close()
    for step in range(2):
        models.train_run_step(second, step)
    second.close()
    return [p.double().sum().item() for p in two.parameters()]


def test_the_run_that_began_the_group_may_end_before_the_other() -> None:
    left, right = ranks.spawn(first_closes_first, 2, timeout=100)
    assert left == right


def test_a_step_while_everything_is_frozen_is_refused_and_can_be_mended() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        models.train_run_step(run, 0)
        with frozen(model):
            run.model(models.batch(1)[0])  # for another Run's backward
            with pytest.raises(
                UsageError, match=r"every parameter .* frozen.*requires_grad_\(True"
            ):
                run.step()
        assert run.step_count == 1
        models.train_run_step(run, 1)
        assert run.stats.plans == 1
