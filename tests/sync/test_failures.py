"""Ranks that fail, die, stop or leave: the others get an error in time."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import sapwood
from sapwood.testing import faults, ranks
from sapwood.testing.ranks import rank
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}
FOREVER = 10_000


def train(steps: int = FOREVER, **settings: Any) -> int:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    settings = {"timeout": 60.0, "first_bucket_mb": 1e-4, "bucket_mb": 1e-4, **settings}
    with sapwood.Run(model, optimizer, **settings) as run:
        for step in range(steps):
            models.train_run_step(run, step)
            if step == 2:
                ranks.mark("training")
        return run.step_count


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FloatingPointError("the layer's own backward failed")


def explode_and_live_on() -> str:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, first_bucket_mb=1e-4, bucket_mb=1e-4) as run:
        for step in range(2):
            models.train_run_step(run, step)
        x, y = models.batch(2, rank())
        hidden = run.model[0](x)
        hidden = Explode.apply(hidden) if rank() == 1 else hidden
        try:
            models.loss_of(run.model[1:](hidden), y).backward()
            run.step()
        except FloatingPointError:
            ranks.mark("caught")
            # The process goes on without ever closing its sockets: only the board can tell.
            threading.Event().wait(120)
    return "went on"


def test_an_exception_inside_backward_of_a_rank_that_lives_on() -> None:
    with ranks.start(explode_and_live_on, 3) as group:
        group.wait_mark("caught", 1, 60)
        outcomes = {o.rank: o for o in group.wait(60, ranks=[0, 2])}
        assert {o.error_type for o in outcomes.values()} == {"PeerFailed"}
        assert all("rank 1" in o.error and "back-propagation" in o.error for o in outcomes.values())


POINTS = ["sync.launch", "sync.update", "run.step"]


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
@pytest.mark.parametrize("point", POINTS)
def test_kill_9_of_a_rank_at_any_point(point: str, engine: str) -> None:
    armed = faults.env(f"{point}:kill@7[rank=1]")
    outcomes = ranks.spawn(train, 3, engine=engine, env=armed, expect_errors=True, timeout=100)
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error_type in {"PeerFailed", "RuntimeError"}
        assert "rank" in outcome.error


@pytest.mark.parametrize("point", POINTS)
def test_an_error_of_ours_on_one_rank_reaches_all(point: str) -> None:
    armed = faults.env(f"{point}:raise@7[rank=0]")
    outcomes = ranks.spawn(train, 3, env=armed, expect_errors=True, timeout=100)
    assert outcomes[0].error_type == "InjectedError"
    for outcome in outcomes[1:]:
        assert outcome.error_type == "PeerFailed"
        assert "rank 0 failed" in outcome.error


def test_death_of_the_rank_that_hosts_the_store() -> None:
    with ranks.start(train, 3, store="rank0") as group:
        for number in range(3):
            group.wait_mark("training", number, 60)
        group.kill(0, signal.SIGKILL)
        outcomes = group.wait(60)
    assert outcomes[0].signal == signal.SIGKILL
    assert {o.error_type for o in outcomes[1:]} == {"PeerFailed"}


def test_a_stopped_rank_is_noticed_after_the_timeout() -> None:
    with ranks.start(train, 2, FOREVER, timeout=4.0) as group:
        for number in range(2):
            group.wait_mark("training", number, 60)
        group.kill(1, signal.SIGSTOP)
        (outcome,) = group.wait(60, ranks=[0])
        assert outcome.error_type == "PeerFailed"
        assert "not answered for 4 s" in outcome.error


def uneven() -> int:
    return train(steps=4 + 2 * rank())


def test_ranks_with_different_numbers_of_batches() -> None:
    short, long = ranks.spawn(uneven, 2, expect_errors=True, timeout=100)
    assert short.value == 4
    assert long.error_type == "PeerFailed"
    assert "rank 0 left the run after 4 steps" in long.error


def faulty_subscriber() -> tuple[int, int]:
    model = models.mlp()
    seen = 0
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:

        def fail(event: sapwood.TensorUpdated) -> None:
            if rank() == 1 and event.step == 2:
                raise OSError("no space left")

        run.events.subscribe(sapwood.TensorUpdated, fail, name="saver")
        for step in range(4):
            try:
                models.train_run_step(run, step)
            except sapwood.errors.SubscriberError as error:
                seen = run.step_count if isinstance(error.__cause__, OSError) else -1
        return run.step_count, seen


def test_a_faulty_subscriber_does_not_stop_the_others() -> None:
    assert ranks.spawn(faulty_subscriber, 2, timeout=100) == [(4, 0), (4, 2)]


def uncaught() -> None:
    model = models.mlp()
    run = sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), timeout=60.0)
    for step in range(FOREVER):
        models.train_run_step(run, step)
        if rank() == 1 and step == 3:
            os._exit(7)


def test_a_rank_that_exits_without_a_word() -> None:
    first, second = ranks.spawn(uncaught, 2, expect_errors=True, timeout=100)
    assert second.exit_code == 7
    assert first.error_type == "PeerFailed"
