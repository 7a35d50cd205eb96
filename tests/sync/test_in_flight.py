"""Gradients on their way, steps that are cut short, and Runs that end in odd ways.

Each was found by reading the engine's code; the scripts are as small as they can be.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import sapwood
from sapwood import TensorUpdated
from sapwood.errors import UsageError
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ONES = torch.ones(1, 2)
SMALL: dict[str, Any] = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6, "timeout": 20.0}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2, bias=False)


def start(model: nn.Module, **settings: Any) -> sapwood.Run:
    return sapwood.Run(model, SGD(model.parameters(), lr=1.0), **{**SMALL, **settings})


# -- a private gradient that was handed over ---------------------------------------------------


def by_another_layers_hook(deed: str) -> str:
    """What was refused."""
    model = layers()
    last = model[2].weight

    def hook(_: Tensor) -> None:
        assert last.grad is not None
        time.sleep(0.05)  # its average may have come
        if deed == "look":
            float(last.grad[0, 0])
        elif rank() == 0:
            last.grad = None if deed == "drop" else torch.ones(2, 2)

    model[0].weight.register_post_accumulate_grad_hook(hook)
    said = ""
    with start(model, update="deferred") as run:
        try:
            (run.model(ONES).sum() * (1 + rank())).backward()
            run.step()
        except (UsageError, sapwood.SapwoodError) as error:
            said = str(error)
    return said


@pytest.mark.parametrize("deed", ["drop", "replace"])
def test_a_gradient_that_is_on_its_way_is_not_dropped_or_replaced_unnoticed(deed: str) -> None:
    said, _ = ranks.spawn(by_another_layers_hook, 2, deed)
    assert "handed over" in said


def test_a_hook_that_looks_at_another_layers_gradient_is_refused() -> None:
    """It would see a share of it, or half its average."""
    for said in ranks.spawn(by_another_layers_hook, 2, "look"):
        assert "is looked at during back-propagation" in said or "failed" in said


# -- gradients outside the plan ----------------------------------------------------------------


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def outside_the_plan(change: bool) -> tuple[float, str]:
    model, said = Sometimes(), ""
    with start(model) as run:
        run.model(ONES, False).sum().backward()
        run.step()
        if rank() == 1:
            time.sleep(0.3)
        (run.model(ONES, True).sum() * (1 + 2 * rank())).backward()
        assert model.b.weight.grad is not None
        seen = float(model.b.weight.grad[0, 0])
        try:
            if change:
                model.b.weight.grad.mul_(0)
            run.step()
        except UsageError as error:
            said = str(error)
    return seen, said


def test_a_gradient_outside_the_plan_is_seen_averaged() -> None:
    assert ranks.spawn(outside_the_plan, 2, False) == [(2.0, ""), (2.0, "")]


def test_a_gradient_outside_the_plan_is_not_changed_unnoticed() -> None:
    for _, said in ranks.spawn(outside_the_plan, 2, True):
        assert "changed" in said


def test_backwards_that_only_accumulate_get_a_plan(tmp_path: Path) -> None:
    model = layers()
    with start(model, folder=tmp_path, bucket_mb=1.0) as run:
        for _ in range(5):
            with run.accumulate():
                run.model(ONES).sum().backward()
            run.step()
        assert run.buckets
        assert run.stats.plans <= 2


# -- changes while an update waits for a subscriber --------------------------------------------


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_a_change_while_an_update_waits_is_refused(tmp_path: Path, what: str) -> None:
    model = linear()
    with start(model, folder=tmp_path) as run:

        def hold(event: TensorUpdated) -> None:
            threading.Timer(0.5, event.hold("test").release).start()

        run.events.subscribe(TensorUpdated, hold)
        run.model(ONES).sum().backward()
        run.step()
        run.model(ONES).sum().backward()
        time.sleep(0.1)
        with torch.no_grad():
            (model.weight.grad if what == "gradient" else model.weight).mul_(0)
        with pytest.raises(UsageError, match="changed"):
            run.step()


# -- a scaler for two Runs ---------------------------------------------------------------------


def one_backward_two_runs(*, overflow: bool) -> tuple[float, float, float]:
    torch.manual_seed(0)
    a, b = linear(), linear()
    before = b.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with (
        sapwood.Run(a, SGD(a.parameters(), lr=1.0), scaler=scaler) as run_a,
        sapwood.Run(b, SGD(b.parameters(), lr=1.0), scaler=scaler) as run_b,
    ):
        loss = run_b.model(run_a.model(ONES)).sum()
        if overflow:
            loss = loss + a.weight.sum() * float("inf")
        scaler.scale(loss).backward()
        expected = b.weight.grad / 8.0 if b.weight.grad is not None else torch.zeros(2, 2)
        expected = expected.detach().clone()
        run_a.step()
        run_b.step()
    moved = (before - b.weight.detach())[0, 0]
    return float(moved), float(expected[0, 0]), scaler.get_scale()


def test_runs_that_share_a_backward_and_a_scaler_unscale_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moved, expected, scale = one_backward_two_runs(overflow=False)
    assert moved == pytest.approx(expected)
    assert scale == 16.0
    moved, expected, scale = one_backward_two_runs(overflow=True)
    assert moved == pytest.approx(expected)
    assert scale == 4.0


# -- engine ddp --------------------------------------------------------------------------------


def thawed_under_ddp() -> str:
    model = layers()
    model[0].requires_grad_(False)
    with sapwood.Run(model, SGD(model.parameters(), lr=1.0), engine="ddp", timeout=20.0) as run:
        run.model(ONES).sum().backward()
        run.step()
        model[0].requires_grad_(True)
        try:
            run.model(ONES).sum().backward()
            run.step()
        except UsageError as error:
            return str(error)
    return ""


def test_ddp_refuses_to_train_on_with_other_parameters() -> None:
    for said in ranks.spawn(thawed_under_ddp, 2):
        assert "engine='layerwise'" in said


def fewer_batches_on_rank_1() -> str:
    model = linear()
    try:
        with sapwood.Run(model, SGD(model.parameters(), lr=1.0), engine="ddp", timeout=20.0) as run:
            for _ in range(4 if rank() == 0 else 2):
                run.model(ONES).sum().backward()
                run.step()
    except RuntimeError as error:  # torch wraps what its hook raises
        return str(error)
    return ""


def test_ddp_says_that_a_rank_left() -> None:
    said, _ = ranks.spawn(fewer_batches_on_rank_1, 2)
    assert "rank 1" in said
    assert "died" not in said


# -- the first plan ----------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.variable = weight  # autograd's own leaves have an attribute of this name
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Scaled.apply(x, self.weight)
        return found


def functions_with_a_variable(update: str) -> tuple[list[float], list[float]]:
    model, plain = Scale(), Scale()
    with start(model, update=update) as run:
        for _ in range(2):
            run.model(ONES).sum().backward()
            run.step()
        wrapped = DistributedDataParallel(plain)
        optimizer = SGD(plain.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(ONES).sum().backward()
            optimizer.step()
    return model.weight.tolist(), plain.weight.tolist()


@pytest.mark.parametrize("update", ["auto", "deferred"])
def test_a_function_with_an_attribute_called_variable(update: str) -> None:
    for ours, theirs in ranks.spawn(functions_with_a_variable, 2, update):
        assert ours == theirs


def test_an_array_in_a_parameter_group(tmp_path: Path) -> None:
    model = linear()
    optimizer = SGD([{"params": list(model.parameters()), "mask": np.ones(3)}], lr=0.1)
    with sapwood.Run(model, optimizer, folder=tmp_path) as run:
        for _ in range(2):
            run.model(ONES).sum().backward()
            run.step()


# -- the end of a step, and of a Run -----------------------------------------------------------


def test_a_step_that_a_scheduler_cut_short_is_not_gone_on_from(tmp_path: Path) -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    with sapwood.Run(model, optimizer, schedulers=[scheduler], folder=tmp_path) as run:
        for _ in range(3):
            run.model(ONES).sum().backward()
            with suppress(ValueError):  # in the third, the scheduler is past its end
                run.step()
        assert run.step_count == 2
        run.model(ONES).sum().backward()
        with pytest.raises(UsageError, match="restore a checkpoint"):
            run.step()


def fails_while_the_other_is_busy() -> float:
    model = linear()
    begin = 0.0
    try:
        with start(model, timeout=30.0) as run:
            if rank() == 1:
                time.sleep(4.0)
            run.model(ONES).sum().backward()
            if rank() == 0:
                begin = time.monotonic()
                raise ValueError("a mistake in the user's loop")
            run.step()
    except (ValueError, sapwood.SapwoodError):
        pass
    return time.monotonic() - begin if rank() == 0 else 0.0


def test_a_rank_that_fails_does_not_wait_for_the_others() -> None:
    took, _ = ranks.spawn(fails_while_the_other_is_busy, 2)
    assert took < 3.5


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.once = linear(), True

    def forward(self, x: Tensor) -> Tensor:
        if self.once:
            self.once = False
            raise KeyboardInterrupt
        found: Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_an_interrupted_forward_leaves_nothing_behind(tmp_path: Path, engine: str) -> None:
    (kinds,) = ranks.spawn(interrupted, 1, tmp_path, engine)
    assert kinds == ["Parameter", "Parameter"]


def interrupted(folder: Path, engine: str) -> list[str]:
    model = Interrupted()
    run = sapwood.Run(model, SGD(model.parameters(), lr=0.1), folder=folder, engine=engine)
    with suppress(KeyboardInterrupt):
        run.model(ONES)
    run.model(ONES).sum().backward()
    run.step()
    kinds = [type(model.inner.weight).__name__]
    model.once = True
    with suppress(KeyboardInterrupt):
        run.model(ONES)
    run.close()
    return [*kinds, type(model.inner.weight).__name__]


def exits(folder: Path, code: object) -> str:
    model = linear()
    try:
        with sapwood.Run(model, SGD(model.parameters(), lr=0.1), folder=folder) as run:
            sys.exit(code)  # type: ignore[arg-type]
    except SystemExit:
        pass
    status: str = json.loads((run.folder / "status.json").read_text())["state"]
    return status


@pytest.mark.parametrize(("code", "state"), [(None, "ended"), (0, "ended"), (3, "failed")])
def test_how_a_script_exits_is_how_its_run_ended(tmp_path: Path, code: object, state: str) -> None:
    assert exits(tmp_path, code) == state


# -- gradient scalers --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_a_scaler_that_the_run_does_not_know_is_noticed(engine: str) -> None:
    """unscale_() writes gradients, and leaves their version counters as they were."""
    model = linear()
    scaler = torch.amp.GradScaler("cpu")
    with start(model, engine=engine) as run:
        for step in range(2):
            scaler.scale(run.model(ONES).sum()).backward()
            if step:
                scaler.unscale_(run.optimizer)
                with pytest.raises(UsageError, match="gradient"):
                    run.step()
            else:
                run.step()


def test_an_operator_called_by_its_own_name_is_noticed() -> None:
    model = linear()
    with start(model) as run:
        run.model(ONES).sum().backward()
        found, scale = torch.zeros(1), torch.ones(1) / 2
        unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
        unscale([model.weight.grad], found, scale)
        with pytest.raises(UsageError, match="gradient"):
            run.step()


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_a_loss_that_was_not_scaled_is_not_unscaled(engine: str) -> None:
    with start(linear(), scaler=torch.amp.GradScaler("cpu"), engine=engine) as run:
        run.model(ONES).sum().backward()
        with pytest.raises(UsageError, match=r"scaler\.scale\(loss\)"):
            run.step()


# -- checkpoints in the middle of a step -------------------------------------------------------


@pytest.mark.parametrize("update", ["auto", "deferred"])
def test_a_checkpoint_is_not_taken_or_restored_in_the_middle_of_a_step(
    update: str, tmp_path: Path
) -> None:
    with (
        start(linear(), update=update) as run,
        sapwood.Checkpointer(run, tmp_path, engine="sync") as checkpoints,
    ):
        run.model(ONES).sum().backward()
        run.step()
        checkpoints.save()
        run.model(ONES).sum().backward()
        for call in (checkpoints.save, checkpoints.restore_latest):
            with pytest.raises(UsageError, match=r"after run\.step\(\)"):
                call()
        run.step()
        assert checkpoints.restore_latest().step == 1
    with pytest.raises(sapwood.SapwoodError, match="closed"):
        checkpoints.save()


def test_a_checkpoint_of_a_closed_run_is_refused(tmp_path: Path) -> None:
    run = start(linear())
    checkpoints = sapwood.Checkpointer(run, tmp_path, engine="sync")
    run.model(ONES).sum().backward()
    run.step()
    run.close()
    with pytest.raises(UsageError, match="closed"):
        checkpoints.save()
    checkpoints.close()
