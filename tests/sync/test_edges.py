"""Gradients that hooks drop, users keep, give or look at in odd ways: right on both ranks, or said.

Each case trains a tiny model on two ranks and returns what happened; the expected value is what a
loop by hand gives, or the words of a refusal.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sapwood
from sapwood.errors import PeerFailed, UsageError
from sapwood.sync import tune
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ONES = torch.ones(1, 2)


def start(model: nn.Module, lr: float = 1.0, **settings: Any) -> sapwood.Run:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    return sapwood.Run(model, optimizer, timeout=20.0, **settings)


def linear(inputs: int = 2, outputs: int = 2) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=False)


def moved(weight: Tensor, before: Tensor) -> float:
    return round((before - weight.detach())[0, 0].item(), 4)


def dropped_by_a_hook(update: str) -> float:
    model = linear()

    def drop(p: Tensor) -> None:
        if rank() == 1:
            p.grad = None

    model.weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    before = model.weight.detach().clone()
    with start(model, update=update) as run:
        run.model(ONES).sum().backward()
        run.step()
    return moved(model.weight, before)


def looked_at_as_any_argument(averaging: str) -> list[tuple[float, ...]]:
    model, seen = linear(), []
    with start(model, lr=0.0, averaging=averaging) as run:
        for step in (1, 2, 3):
            if rank() == 1:
                time.sleep(0.05)
            (run.model(ONES).sum() * step * (1 + 2 * rank())).backward()
            gradient = model.weight.grad
            assert gradient is not None
            looks = (torch.zeros(2, 2) + gradient, torch.stack([gradient])[0])
            looks += (torch.zeros(2, 2).add_(other=gradient), copy.deepcopy(gradient))
            torch.save(gradient, file := io.BytesIO())
            looks += (torch.load(io.BytesIO(file.getvalue()), weights_only=True),)
            seen.append(tuple(look[0, 0].item() for look in looks))
            run.step()
    return seen


class FrozenHead(nn.Module):
    """Every gradient comes from inside a nested pass."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = linear(), linear().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.low, x, use_reentrant=True))


def looked_at_after_nested_passes() -> bool:
    model = FrozenHead()
    with start(model) as run:
        for step in range(1, 4):
            before = model.low.weight.detach().clone()
            (run.model(ONES.clone().requires_grad_()).sum() * step).backward()
            assert model.low.weight.grad is not None
            gradient = model.low.weight.grad.clone()
            run.step()
            if not torch.allclose(before - model.low.weight.detach(), gradient):
                return False
    return True


def changed_after_nested_passes() -> None:
    model = FrozenHead()
    with start(model) as run:
        for _ in range(3):
            run.model(ONES.clone().requires_grad_()).sum().backward()
            assert model.low.weight.grad is not None
            model.low.weight.grad.mul_(0.5)
            run.step()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in a nested pass")


def going_on_after_a_nested_pass_failed() -> None:
    model = FrozenHead()
    low = model.low
    model.low = nn.Sequential(nn.Identity(), low)  # type: ignore[assignment]
    with start(model) as run:
        for step in range(4):
            if step == 2 and rank() == 1:  # fails when the gradient of ``low`` is there
                model.low = nn.Sequential(Apply(), low)  # type: ignore[assignment]
            with suppress(ValueError):
                run.model(ONES.clone().requires_grad_()).sum().backward()
            run.step()


class Apply(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Raises.apply(x) + x


def going_on_after_the_start_of_a_backward_failed() -> None:
    model = nn.Sequential(linear(), linear())
    with start(model) as run:
        run.model(ONES).sum().backward()
        run.step()
        handle = run.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UsageError, match="pre-hook"):
            run.model(ONES).sum().backward()
        handle.remove()
        run.step()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 2, sparse=True), linear()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.table(x))


def going_on_after_the_end_of_a_backward_failed() -> None:
    model = Lookup()
    model.table.sparse = rank() == 1
    with start(model, update="deferred") as run:
        try:
            run.model(torch.tensor([0, 1])).sum().backward()
        except UsageError:
            run.optimizer.zero_grad()
        run.step()


def kept_and_put_back(update: str) -> float:
    model = linear()
    with start(model, update=update) as run:
        run.model(ONES).sum().backward()
        kept = model.weight.grad
        run.step()
        before = model.weight.detach().clone()
        model.weight.grad = kept
        run.model(ONES).sum().backward()
        run.step()
    return moved(model.weight, before)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, both: bool) -> Any:
        return self.a(x) + (self.b(x) if both else 0)


def given_where_none_came(update: str, planned: bool) -> float:
    model = Sometimes()
    small = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6}
    with start(model, update=update, **small) as run:
        run.model(ONES, planned).sum().backward()
        run.step()
        run.model(ONES, False).sum().backward()
        before = model.b.weight.detach().clone()
        model.b.weight.grad = torch.ones(2, 2)
        run.step()
    return moved(model.b.weight, before)


def woken_again_and_again() -> list[float]:
    """A gradient outside the plan must be scaled once, also when its bucket has been there."""
    model, moves = Sometimes(), []
    with start(model, replan_after=10) as run:
        for step in range(4):
            before = model.b.weight.detach().clone()
            run.model(ONES, step > 0).sum().backward()
            run.step()
            moves.append(moved(model.b.weight, before))
    return moves


def unfrozen_and_called_in_parts() -> None:
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    with sapwood.Run(model, optimizer, timeout=20.0) as run:
        for step in range(4):
            model.requires_grad_(step >= 2 or model[0].weight.requires_grad)
            model[1].requires_grad_(True)
            model[1](model[0](ONES)).sum().backward()
            run.step()


def unfrozen_where_a_rank_skips() -> int:
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    with sapwood.Run(model, optimizer, timeout=20.0) as run:
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            if step != 2 or rank() == 0:
                run.model(ONES).sum().backward()
            run.step()
        return run.step_count


def collected_on_its_own_thread() -> list[str]:
    model = linear()
    run = start(model)
    run.model(ONES).sum().backward()
    run.step()
    worker = run._engine._worker  # type: ignore[attr-defined]
    run.me = run  # type: ignore[attr-defined]
    logging.getLogger("sapwood").setLevel(logging.CRITICAL)
    gc.collect()
    gc.disable()
    ended = threading.Event()
    del run
    worker.submit(lambda: (gc.collect(), ended.set()))
    assert ended.wait(20)
    gc.enable()
    for thread in threading.enumerate():
        if thread.name in ("sapwood-update", "sapwood-sum"):
            thread.join(10)
    return [t.name for t in threading.enumerate() if t.name in ("sapwood-update", "sapwood-sum")]


def nothing_trained_in_the_first_step() -> bool:
    tune._WORTHWHILE = 0
    model = linear()
    with start(model, lr=0.0) as run:
        run.step()
        for _ in range(3):
            run.model(ONES).sum().backward()
            run.step()
        return run.tuner.measuring


AVERAGES = [(2.0,) * 5, (4.0,) * 5, (6.0,) * 5]
CHANGED, BROKEN = "was changed after backward", "broke this run's step"
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "dropped, layerwise": (dropped_by_a_hook, ("layerwise",), 0.5),
    "dropped, deferred": (dropped_by_a_hook, ("deferred",), 0.5),
    "any argument, node": (
        looked_at_as_any_argument,
        ("node",),
        [(2.0,) * 5, (4.0,) * 5, (6.0,) * 5],
    ),
    "any argument, direct": (
        looked_at_as_any_argument,
        ("direct",),
        [(2.0,) * 5, (4.0,) * 5, (6.0,) * 5],
    ),
    "nested, looked at": (looked_at_after_nested_passes, (), True),
    "nested, changed": (changed_after_nested_passes, (), CHANGED),
    "nested, failed": (going_on_after_a_nested_pass_failed, (), BROKEN),
    "start failed": (going_on_after_the_start_of_a_backward_failed, (), BROKEN),
    "end failed": (going_on_after_the_end_of_a_backward_failed, (), BROKEN),
    "put back, layerwise": (kept_and_put_back, ("layerwise",), "was kept from an earlier step"),
    "put back, deferred": (kept_and_put_back, ("deferred",), 2.0),
    "given, dormant, layerwise": (given_where_none_came, ("layerwise", False), CHANGED),
    "given, planned, layerwise": (given_where_none_came, ("layerwise", True), CHANGED),
    "given, dormant, deferred": (given_where_none_came, ("deferred", False), 1.0),
    "given, planned, deferred": (given_where_none_came, ("deferred", True), 1.0),
    "woken": (woken_again_and_again, (), [0.0, 1.0, 1.0, 1.0]),
    "unfrozen, called in parts": (unfrozen_and_called_in_parts, (), "only parts of the model"),
    "unfrozen, a rank skips": (unfrozen_where_a_rank_skips, (), 4),
    "collected on its thread": (collected_on_its_own_thread, (), []),
    "nothing in the first step": (nothing_trained_in_the_first_step, (), True),
}


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (function, arguments, _) in CASES.items():
        try:
            found[name] = function(*arguments)
        except UsageError as error:
            found[name] = str(error)
        except PeerFailed as error:  # the other rank was quicker, or the only one
            found[name] = f"PeerFailed: {error}"
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("edges")
    return ranks.spawn(everything, 2, folder, init=True, cwd=folder, timeout=110)


@pytest.mark.parametrize("name", CASES)
def test_right_on_both_ranks_or_said(name: str, outcomes: list[dict[str, Any]]) -> None:
    want = CASES[name][2]
    found = [one[name] for one in outcomes]
    if not isinstance(want, str):
        assert found == [want, want]
        return
    # Whoever was refused says why; the other rank hears of it.
    assert any(isinstance(one, str) and want in one for one in found), found
    assert all(isinstance(one, str) and ("PeerFailed" in one or want in one) for one in found), (
        found
    )
