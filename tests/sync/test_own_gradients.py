"""Gradients that are a rank's own, weights of odd strides, and steps that are interrupted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood import TensorUpdated
from sapwood.errors import FenceTimeout, UsageError
from sapwood.sync.tune import Choice
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ONES = torch.ones(1, 2)
SMALL: dict[str, Any] = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6, "timeout": 15.0}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2, bias=False)


class Own(torch.optim.Optimizer):
    per_parameter = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "own":
        return Own(model.parameters())
    # This kernel of torch's writes to gradients.
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, foreach=True)


def changed_after_backward(kind: str, change: str, engine: str) -> tuple[str, Tensor]:
    model = linear()
    optimizer = optimizer_of(kind, model)
    with sapwood.Run(model, optimizer, timeout=20.0, engine=engine) as run:
        assert run.update_mode == "layerwise"

        def hold(event: TensorUpdated) -> None:
            if rank() == 0:  # as a checkpoint does, so that rank 1 is ahead
                threading.Timer(0.3, event.hold("test").release).start()

        run.events.subscribe(TensorUpdated, hold)
        for _ in range(2):
            run.model(ONES).sum().backward()
            assert model.weight.grad is not None
            assert torch.isfinite(model.weight.grad).all()
            run.step()
        run.model(ONES).sum().backward()
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        else:
            optimizer.zero_grad()
        with pytest.raises(UsageError) as refused:
            run.step()
    return str(refused.value), model.weight.detach().clone()


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
@pytest.mark.parametrize(("kind", "change"), [("own", "clip"), ("nesterov", "zero_grad")])
def test_a_gradient_changed_before_step_is_refused_with_any_optimizer(
    kind: str, change: str, engine: str
) -> None:
    outcomes = ranks.spawn(
        changed_after_backward, 2, kind, change, engine, init=engine == "ddp", timeout=60
    )
    for message, _ in outcomes:
        assert "update='deferred'" in message
    assert torch.equal(outcomes[0][1], outcomes[1][1])


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "turned":
        return Turned()
    return nn.Conv3d(3, 4, 2).to(memory_format=torch.channels_last_3d)


def batch(kind: str, step: int) -> Tensor:
    chance = torch.Generator().manual_seed(10 * step + rank())
    if kind == "turned":
        return torch.randn(5, 6, generator=chance)
    made = torch.randn(2, 3, 4, 4, 4, generator=chance)
    return made.to(memory_format=torch.channels_last_3d)


def fused_and_strided() -> None:
    for kind in ("turned", "channels_last_3d"):
        plain = build(kind)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
        wrapped = DistributedDataParallel(plain)
        for step in range(3):
            wrapped(batch(kind, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for update in ("layerwise", "deferred"):
            model = build(kind)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            with sapwood.Run(model, optimizer, update=update, timeout=20.0) as run:
                for step in range(3):
                    run.model(batch(kind, step)).square().mean().backward()
                    run.step()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a, b), (kind, update)


def test_fused_kernels_and_weights_of_any_dense_strides() -> None:
    ranks.spawn(fused_and_strided, 2, init=True, timeout=60)


def test_a_model_laid_out_anew_under_its_run_is_refused() -> None:
    model = nn.Conv2d(3, 4, 2)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        run.model(torch.ones(1, 3, 4, 4)).sum().backward()
        run.step()
        model.to(memory_format=torch.channels_last)
        with pytest.raises(UsageError, match=r"weight was .* with strides \(12, 4, 2, 1\)"):
            run.model(torch.ones(1, 3, 4, 4))


def interrupted(engine: str, update: str) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def full_disk(*_: object) -> None:
        raise ValueError("disk full")

    optimizer.register_step_post_hook(full_disk)
    with sapwood.Run(model, optimizer, update=update, engine=engine, timeout=20.0) as run:
        run.model(ONES).sum().backward()
        with pytest.raises(ValueError, match="disk full"):
            run.step()
        after = model.weight.detach().clone()
        with pytest.raises((UsageError, ValueError), match=r"restart from|disk full"):
            run.step()
        assert torch.equal(model.weight, after)


@pytest.mark.parametrize("update", ["layerwise", "deferred"])
@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_a_step_that_was_interrupted_cannot_be_repeated(engine: str, update: str) -> None:
    ranks.spawn(interrupted, 2, engine, update, init=engine == "ddp", timeout=60)


def test_a_hold_that_was_too_long_is_not_forgotten() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with sapwood.Run(model, optimizer, update="deferred", fence_timeout=0.05) as run:
        run.events.subscribe(TensorUpdated, lambda event: event.hold("a checkpoint"))
        run.model(ONES).sum().backward()
        run.step()
        held = model.weight.detach().clone()
        run.model(ONES).sum().backward()
        with pytest.raises(FenceTimeout):
            run.step()
        with pytest.raises(UsageError):
            run.step()
        assert torch.equal(model.weight, held)


def sharing_a_backward() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    settings: dict[str, Any] = {"timeout": 15.0, "update": "deferred"}
    with (
        sapwood.Run(a, torch.optim.SGD(a.parameters(), lr=0.1), **settings) as run_a,
        sapwood.Run(b, torch.optim.SGD(b.parameters(), lr=0.1), **settings) as run_b,
    ):
        for step in range(4):
            loss = run_b.model(ONES).sum()
            if rank() == 0 or step < 2:
                loss = loss + run_a.model(ONES).sum()  # the later forward: its gradients come first
            loss.backward()
            run_a.step()
            run_b.step()


def test_a_rank_without_gradients_for_one_of_two_runs_that_share_a_backward() -> None:
    ranks.spawn(sharing_a_backward, 2, timeout=60)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.1)  # averages are there, and applied, meanwhile
        return gradient


class ReadsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.early = nn.Tanh()
        self.early.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * self.late.weight.detach().norm(),)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.late(_Slow.apply(self.early(self.first(x))))))
        return out


def careful(kind: str) -> int:
    torch.manual_seed(0)
    model = ReadsLate()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), **SMALL) as run:
        if kind == "after back-propagation":
            run.tuner.choice = Choice(bucket_mb=1e-6, overlap=False)
        for step in range(5):
            if kind == "after back-propagation" and step == 3:
                run.events.subscribe(TensorUpdated, lambda event: None)
            if kind != "no batch" or step or rank() == 0:
                run.model(torch.ones(1, 4)).sum().backward()
            run.step()
        return run.step_count


@pytest.mark.parametrize("kind", ["no batch", "after back-propagation"])
def test_late_reads_are_learned_before_the_first_early_update(kind: str) -> None:
    assert ranks.spawn(careful, 2, kind, timeout=60) == [5, 5]


def changed_by_another_layers_hook(update: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    last = model[2].weight

    def meddle(p: Tensor) -> None:
        time.sleep(0.2)  # the last layer's bucket is on its way
        assert last.grad is not None
        last.grad.mul_(2.0)

    model[0].weight.register_post_accumulate_grad_hook(meddle)  # type: ignore[no-untyped-call]
    optimizer = Own(model.parameters())
    with sapwood.Run(model, optimizer, update=update, **SMALL) as run:
        try:
            run.model(ONES).sum().backward()
            run.step()
        except UsageError as refused:
            return str(refused)
    return "not refused"


@pytest.mark.parametrize("update", ["layerwise", "deferred"])
def test_a_gradient_on_its_way_that_another_layers_hook_changes_is_refused(update: str) -> None:
    for message in ranks.spawn(changed_by_another_layers_hook, 2, update, timeout=60):
        assert "handed over for averaging" in message


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.a(x)
        return out + self.b(x) if both else out


def outside_the_plan(update: str, clip: float | None) -> None:
    plain, model = Branching(), Branching()
    optimizer = Own(plain.parameters())
    settings: dict[str, Any] = {"update": update, "clip_grad_norm": clip, "replan_after": 100}
    with sapwood.Run(model, Own(model.parameters()), timeout=20.0, **settings) as run:
        for step in range(6):
            both = step in (1, 2, 4)
            plain(ONES, both).sum().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            run.model(ONES, both).sum().backward()
            run.step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("update", "clip"), [("layerwise", None), ("deferred", 0.1)])
def test_gradients_that_come_now_and_then_are_not_taken_for_changed_ones(
    update: str, clip: float | None
) -> None:
    outside_the_plan(update, clip)
    ranks.spawn(outside_the_plan, 2, update, clip, timeout=60)
