"""Buffers are rank 0's on every rank after each step, whatever ranks made of them meanwhile."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ENGINES = [{"update": "layerwise"}, {"update": "deferred"}, {"engine": "ddp"}]


def start(model: nn.Module, **settings: Any) -> sapwood.Run:
    return sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=15.0, **settings)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(8 * 2**20))  # takes a while to copy

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.a(x)
        return out + self.b(x) if both else out


def branching(averaging: str) -> int:
    """From the second step on, ``b`` is outside the plan; rank 0 is the last to send."""
    torch.manual_seed(0)
    with start(Branching(), averaging=averaging, replan_after=10) as run:
        for step in range(3):
            if rank() == 0:
                time.sleep(0.2)
            run.model(torch.ones(1, 2), step > 0).sum().backward()
            run.step()
        return run.stats.misfits


@pytest.mark.parametrize("averaging", ["node", "direct"])
def test_gradients_outside_the_plan_and_buffers_travel_in_one_order(averaging: str) -> None:
    assert ranks.spawn(branching, 2, averaging, timeout=60) == [2, 2]


class Growing(nn.Module):
    """Has a cache as long as this rank's longest batch, in front of a buffer that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.cache):
            self.cache = torch.ones(len(x))
        self.mean += 1.0 + rank()
        out: Tensor = self.head(x) * self.cache[: len(x), None]
        return out


class Lazy(nn.Module):
    """Makes its buffer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.ones(1) if self.mean is None else self.mean + 1.0 + rank()
        out: Tensor = self.head(x)
        return out


def differing(settings: dict[str, Any]) -> tuple[list[float], list[str], list[float | None]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sapwood.sync.buffers").addHandler(handler)
    growing, means = Growing(), []
    with start(growing, **settings) as run:
        for step in range(4):
            run.model(torch.ones(4 + 8 * (rank() + 1 if step == 2 else rank()), 2)).sum().backward()
            run.step()
            means.append(growing.mean.item())
    lazy, seen = Lazy(), []
    with start(lazy, **settings) as run:
        for step in range(4):
            if step or rank() == 0 or "engine" in settings:
                run.model(torch.ones(4, 2)).sum().backward()
            run.step()
            seen.append(None if lazy.mean is None else lazy.mean.item())
    return means, said, seen


@pytest.mark.parametrize("settings", ENGINES)
def test_buffers_that_other_ranks_lack_or_have_in_another_shape(settings: dict[str, Any]) -> None:
    first, second = ranks.spawn(differing, 2, settings, timeout=60)
    assert first[0] == second[0] == [1.0, 2.0, 3.0, 4.0]
    assert first[1] == []
    (said,) = second[1]  # once, though shapes change again
    assert "cache is torch.float32 [12] here, and torch.float32 [4] on rank 0" in said
    assert first[2] == [1.0, 2.0, 3.0, 4.0]
    assert second[2][1:] == first[2][1:]
    assert second[2][0] == (1.0 if "engine" in settings else None)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("centre", torch.zeros(1))
        self.norm = nn.BatchNorm1d(2)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.centre.item() + self.norm.running_mean.sum().item())
        out: Tensor = self.norm(self.head(x)) - self.centre
        return out


def changed_late(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    def batch(step: int) -> Tensor:
        return torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + rank()))

    torch.manual_seed(0)
    theirs = Centred()
    torch.manual_seed(0)
    ours = Centred()
    wrapped = DistributedDataParallel(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(4):
        wrapped(batch(step)).square().sum().backward()
        theirs.centre += 1 + rank()
        theirs.norm(batch(step + 50))  # in training mode: statistics move
        optimizer.step()
        optimizer.zero_grad()
    with start(ours, **settings) as run:
        for step in range(4):
            run.model(batch(step)).square().sum().backward()
            ours.centre += 1 + rank()
            ours.norm(batch(step + 50))
            run.step()
    # DDP takes rank 0's over at the next forward: what training forwards see is the same.
    return theirs.seen, ours.seen


@pytest.mark.parametrize("settings", ENGINES)
def test_buffers_changed_between_backward_and_step(settings: dict[str, Any]) -> None:
    for theirs, ours in ranks.spawn(changed_late, 2, settings, init=True, timeout=60):
        assert theirs == ours
