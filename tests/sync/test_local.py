"""One rank: the engine against the loop everybody writes by hand, bit for bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.errors import ConfigError, FenceTimeout, SubscriberError, UsageError
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulate: int = 1,
    before_step: Callable[[sapwood.Run], object] = lambda run: None,
    **settings: Any,
) -> list[float]:
    losses = []
    with sapwood.Run(model, optimizer, **settings) as run:
        for step in range(steps):
            parts = [models.batch(step * accumulate + part) for part in range(accumulate)]
            with run.accumulate():
                for x, y in parts[:-1]:
                    models.loss_of(run.model(x), y).backward()
            x, y = parts[-1]
            loss = models.loss_of(run.model(x), y)
            loss.backward()
            before_step(run)
            run.step()
            losses.append(loss.item())
    return losses


def pair(build: Callable[[], nn.Module] = models.mlp) -> tuple[nn.Module, nn.Module]:
    return build(), build()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam"])
@pytest.mark.parametrize("update", ["auto", "deferred"])
def test_equals_the_plain_loop(name: str, update: str) -> None:
    plain, ours = pair()
    make = getattr(torch.optim, name)
    expected = models.train_plain(plain, make(plain.parameters(), lr=0.05), 6)
    got = train(ours, make(ours.parameters(), lr=0.05), 6, update=update, first_bucket_mb=0.001)
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))


class Foreign(torch.optim.Adam):
    """Overrides step, so nothing is known of it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_foreign_optimizer_is_stepped_once_after_backward() -> None:
    plain, ours = pair()
    expected = models.train_plain(plain, Foreign(plain.parameters(), lr=0.01), 4)
    events: list[int] = []

    def watch(run: sapwood.Run) -> None:
        assert run.update_mode == "whole"
        if run.step_count == 0:
            run.events.subscribe(sapwood.TensorUpdated, lambda e: events.append(e.bucket))

    got = train(ours, Foreign(ours.parameters(), lr=0.01), 4, before_step=watch)
    assert got == expected
    assert len(events) == 4


def test_clipping_equals_torch() -> None:
    plain, ours = pair()
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 5, clip=0.05)
    got = train(ours, torch.optim.SGD(ours.parameters(), **SGD), 5, clip_grad_norm=0.05)
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))


def test_clipping_by_hand_works_when_deferred() -> None:
    plain, ours = pair()
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 5, clip=0.05)
    got = train(
        ours,
        torch.optim.SGD(ours.parameters(), **SGD),
        5,
        update="deferred",
        before_step=lambda run: torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.05),
    )
    assert got == expected


def test_clipping_by_hand_is_refused_when_it_comes_too_late() -> None:
    model = models.mlp()
    with pytest.raises(UsageError, match="clip_grad_norm"):
        train(
            model,
            torch.optim.SGD(model.parameters(), **SGD),
            2,
            before_step=lambda run: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        )


def test_accumulation_equals_the_plain_loop() -> None:
    plain, ours = pair()
    make = lambda m: torch.optim.SGD(m.parameters(), **SGD)  # noqa: E731
    expected = models.train_plain(plain, make(plain), 4, accumulate=3)
    assert train(ours, make(ours), 4, accumulate=3) == expected
    assert models.same(models.weights(plain), models.weights(ours))


def test_schedulers_and_groups() -> None:
    plain, ours = pair()

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        params = list(model.parameters())
        groups = [{"params": params[:3], "lr": 0.3}, {"params": params[3:]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    optimizer, scheduler = make(plain)
    expected = []
    for step in range(6):
        expected += models.train_plain_step(plain, optimizer, step)
        scheduler.step()
    optimizer, scheduler = make(ours)
    assert train(ours, optimizer, 6, schedulers=[scheduler]) == expected
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * 0.125)


def test_frozen_parameters_stay_and_can_be_thawed_later() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    expected = [models.train_plain_step(plain, optimizer, s) for s in range(3)]
    plain[0].requires_grad_(True)
    expected += [models.train_plain_step(plain, optimizer, s) for s in range(3, 6)]

    before = ours[0].weight.detach().clone()
    with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD)) as run:
        got = [models.train_run_step(run, s) for s in range(3)]
        assert torch.equal(ours[0].weight, before)
        ours[0].requires_grad_(True)
        got += [models.train_run_step(run, s) for s in range(3, 6)]
        assert run.stats.plans == 2
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))


@pytest.mark.parametrize("kind", ["bf16 autocast", "bf16 weights", "channels_last"])
def test_precisions_and_layouts(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3, padding=1)
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.conv.weight.dtype).view(-1, 1, 4, 4)
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16 autocast"):
                return self.head(torch.relu(self.conv(x)).flatten(1)).float()

    plain, ours = (models.seeded(Net) for _ in range(2))
    for model in (plain, ours):
        if kind == "bf16 weights":
            model.to(torch.bfloat16)
        if kind == "channels_last":
            model.to(memory_format=torch.channels_last)
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 4)
    assert train(ours, torch.optim.SGD(ours.parameters(), **SGD), 4) == expected
    assert models.same(models.weights(plain), models.weights(ours))


def test_scaler_skips_a_step_with_inf_and_goes_on() -> None:
    model = models.mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), scaler=scaler) as run:
        assert run.update_mode == "deferred"
        before = models.weights(model)
        outcomes = []
        for step in range(3):
            x, y = models.batch(step)
            loss = models.loss_of(run.model(x), y) * (float("inf") if step == 0 else 1.0)
            scaler.scale(loss).backward()
            outcomes.append(run.step().skipped)
            if step == 0:
                assert models.same(before, models.weights(model))
                assert scaler.get_scale() == 4.0
        assert outcomes == [True, False, False]
        assert not models.same(before, models.weights(model))


def test_nan_is_handled_as_in_torch() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        x, y = models.batch(0)
        (models.loss_of(run.model(x), y) * float("nan")).backward()
        run.step()
    assert all(torch.isnan(p).all() for p in model.parameters())


@pytest.mark.parametrize("reentrant", [None, False])
def test_shared_parameters(reentrant: bool | None) -> None:
    plain, ours = (models.seeded(lambda: models.Shared(reentrant)) for _ in range(2))
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 4)
    got = train(
        ours, torch.optim.SGD(ours.parameters(), **SGD), 4, first_bucket_mb=1e-4, bucket_mb=1e-4
    )
    assert got == expected


def test_reentrant_checkpointing_over_a_shared_parameter_is_refused() -> None:
    model = models.seeded(lambda: models.Shared(reentrant=True))
    with pytest.raises(UsageError, match="use_reentrant=False"):
        train(model, torch.optim.SGD(model.parameters(), **SGD), 3)


def test_reentrant_checkpointing_without_sharing_is_planned_from_the_first_step() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=True)
            return self.head(x)

    plain, ours = (models.seeded(Segments) for _ in range(2))
    expected = models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 6)
    with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD), replan_after=2) as run:
        assert [models.train_run_step(run, s)[0] for s in range(6)] == expected
        assert {n for b in run.buckets for n in b} == {n for n, _ in ours.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_an_earlier_layer_still_needs_is_updated_late(
    fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours = (models.seeded(models.Detached) for _ in range(2))
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.5, fused=fused)  # noqa: E731
    expected = models.train_plain(plain, make(plain), 5)
    with caplog.at_level(logging.WARNING):
        got = train(ours, make(ours), 5, first_bucket_mb=1e-4, bucket_mb=1e-4)
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))
    assert "late.weight" in caplog.text


def test_branches_that_come_and_go() -> None:
    plain, ours = (models.seeded(models.Branches) for _ in range(2))
    choices = [("left",)] * 5 + [("right",)] * 6 + [("left", "right"), ()] * 3
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    expected, got = [], []
    for step, use in enumerate(choices):
        plain.use = use
        expected.append(models.train_plain_step(plain, optimizer, step))
    with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD)) as run:
        for step, use in enumerate(choices):
            ours.use = use
            got.append(models.train_run_step(run, step))
        assert run.stats.misfits > 0
        assert run.stats.plans > 1
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))


def test_a_step_without_backward_changes_nothing() -> None:
    model = models.mlp()
    before = models.weights(model)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        assert run.step().skipped
        assert models.same(before, models.weights(model))
        models.train_run_step(run, 0)
        assert not models.same(before, models.weights(model))


def test_backward_twice_and_a_forgotten_step_are_named() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        x, y = models.batch(0)
        models.loss_of(run.model(x), y).backward()
        with pytest.raises(UsageError, match=r"run\.step"):
            models.loss_of(run.model(x), y).backward()
        with pytest.raises(UsageError, match="checkpoint"):
            run.step()


def test_the_users_own_optimizer_step_is_refused() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer) as run:
        models.train_run_step(run, 0)
        with pytest.raises(UsageError, match=r"run\.step"):
            optimizer.step()
    optimizer.step()


def test_step_hooks_of_the_user_are_run_once_a_step() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    train(model, optimizer, 2)
    assert calls == ["after", "after"]
    optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    with sapwood.Run(model, optimizer) as run:
        assert run.update_mode == "deferred"
        models.train_run_step(run, 0)
    assert calls[2:] == ["before", "after"]


def test_double_backward_is_refused_and_inner_gradients_are_not_mistaken_for_a_step() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        x, y = models.batch(0)
        x.requires_grad_()
        output = run.model(x)
        (inner,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (models.loss_of(output, y) + inner.square().mean()).backward()
        assert not run.step().skipped
        with pytest.raises(UsageError, match="create_graph"):
            models.loss_of(run.model(models.batch(1)[0]), models.batch(1)[1]).backward(
                create_graph=True
            )


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph")
def test_sparse_gradients_are_refused() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    model = Words()
    with (
        sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run,
        pytest.raises(UsageError, match="sparse"),
    ):
        run.model(torch.tensor([1, 2])).sum().backward()


def test_an_infinite_limit_only_measures_the_norm() -> None:
    plain, ours = pair()
    models.train_plain(plain, torch.optim.SGD(plain.parameters(), **SGD), 3)
    norms = []
    with sapwood.Run(
        ours, torch.optim.SGD(ours.parameters(), **SGD), clip_grad_norm=math.inf
    ) as run:
        for step in range(3):
            x, y = models.batch(step)
            models.loss_of(run.model(x), y).backward()
            norms.append(run.step().grad_norm)
    assert all(norm is not None and 0 < norm < math.inf for norm in norms)
    assert models.same(models.weights(plain), models.weights(ours))


def test_configurations_that_cannot_work() -> None:
    model = models.mlp()
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3, 7))], lr=0.1)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(3, 7\)"):
        sapwood.Run(model, foreign)
    with pytest.raises(ConfigError, match="unknown setting 'bucket'"):
        sapwood.Run(model, good, bucket=3)
    with pytest.raises(ConfigError, match=r"schedulers.*did you mean 'time_limit'"):
        sapwood.Run(model, good, time_limt=3)
    with pytest.raises(ConfigError, match="engine is 'magic'"):
        sapwood.Run(model, good, engine="magic")
    with pytest.raises(ConfigError, match="more than 0"):
        sapwood.Run(model, good, clip_grad_norm=-1.0)
    split = models.mlp()
    split[0].to("meta")
    with pytest.raises(ConfigError, match="several devices"):
        sapwood.Run(split, torch.optim.SGD(split.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="no parameters"):
        sapwood.Run(nn.Tanh(), good)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        sapwood.Run(model, good)


def test_fence_timeout_and_subscriber_error_reach_the_training_thread() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, fence_timeout=0.05) as run:

        def faulty(event: sapwood.StepEnded) -> None:
            raise ValueError("disk full")

        subscription = run.events.subscribe(sapwood.StepEnded, faulty, name="saver")
        with pytest.raises(SubscriberError, match=r"'saver'.*disk full"):
            models.train_run_step(run, 0)
        subscription.cancel()
        models.train_run_step(run, 1)
        run.events.subscribe(sapwood.TensorUpdated, lambda e: e.hold("slow one"), name="x")
        models.train_run_step(run, 2)
        with pytest.raises(FenceTimeout, match="slow one"):
            models.train_run_step(run, 3)
