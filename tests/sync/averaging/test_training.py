"""Whole Runs through the memory of machines, beside DistributedDataParallel."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank, world
from tests.marks import needs_machines
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}
TINY = {"first_bucket_mb": 1e-3, "bucket_mb": 1e-3}
STEPS = 4


def by_ddp(accumulate: int = 1, clip: float | None = None) -> list[Tensor]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = models.batch(step * accumulate + part, rank())
            with wrapped.no_sync() if part < accumulate - 1 else nullcontext():
                models.loss_of(wrapped(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return models.weights(model)


def by_run(averaging: str, accumulate: int = 1, clip: float | None = None) -> list[Tensor]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    settings: dict[str, Any] = {"averaging": averaging, "clip_grad_norm": clip, **TINY}
    with sapwood.Run(model, optimizer, **settings) as run:
        for step in range(STEPS):
            for part in range(accumulate):
                x, y = models.batch(step * accumulate + part, rank())
                with run.accumulate(active=part < accumulate - 1):
                    models.loss_of(run.model(x), y).backward()
            run.step()
        assert len(run.buckets) > 2
    return models.weights(model)


def apart(weights: list[Tensor]) -> float:
    """How far this rank's weights are from rank 0's."""
    worst = 0.0
    for tensor in weights:
        theirs = tensor.clone()
        dist.broadcast(theirs, 0)
        worst = max(worst, (theirs - tensor).abs().max().item())
    return worst


def off(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def compare() -> dict[str, tuple[float, float]]:
    """For each way: how far from DDP, and how far from rank 0."""
    found = {}
    for name, options in {
        "plain": {},
        "accumulate": {"accumulate": 3},
        "clip": {"clip": 0.05},
        "both": {"accumulate": 2, "clip": 0.05},
    }.items():
        reference = by_ddp(**options)
        for averaging in ("node", "direct") if name == "plain" else ("node",):
            ours = by_run(averaging, **options)
            found[f"{name} {averaging}"] = off(ours, reference), apart(ours)
    return found


def check_close(found: list[dict[str, tuple[float, float]]]) -> None:
    for facts in found:
        assert len(facts) == 5
        for name, (from_ddp, from_rank0) in facts.items():
            assert from_rank0 == 0.0, name
            assert from_ddp < 1e-5, name


def test_one_machine_trains_as_ddp() -> None:
    found = ranks.spawn(compare, 2, init=True)
    check_close(found)
    # On two ranks a sum has one order: not a bit differs.
    assert all(facts["plain node"][0] == 0.0 for facts in found)


@needs_machines
def test_two_machines_train_as_ddp() -> None:
    check_close(ranks.spawn(compare, 3, init=True, machines=[2, 1]))


def averaged_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad.mul_(1.0 / world()))


def replan() -> dict[str, Any]:
    """A model whose graph changes gets new layouts; what is trained stays right."""
    found: dict[str, Any] = {}
    uses = [("left",)] * 4 + [("right",)] * 5 + [("right", "left")] * 4
    model = models.seeded(models.Branches)
    plain = copy.deepcopy(model)
    # Without momentum, a zero gradient and none are the same.
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, use in enumerate(uses):
        plain.use = use
        optimizer.zero_grad()
        x, y = models.batch(step, rank())
        models.loss_of(plain(x), y).backward()
        averaged_by_hand(plain)
        optimizer.step()
    settings: dict[str, Any] = {"averaging": "node", "replan_after": 1, **TINY}
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings) as run:
        for step, use in enumerate(uses):
            model.use = use
            models.train_run_step(run, step)
        found["plans"] = run.stats.plans
    found["off"] = off(models.weights(model), models.weights(plain))
    found["apart"] = apart(models.weights(model))
    return found


def go_back() -> bool:
    """Steps repeated from an earlier state give the same weights."""
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, averaging="node", **TINY) as run:
        for step in range(2):
            models.train_run_step(run, step)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        ends = []
        for _ in range(3):
            for step in range(2, 5):
                models.train_run_step(run, step)
            ends.append(models.weights(model))
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
            run.resume_at(2)
        assert run.step_count == 2
    return all(models.same(one, ends[0]) for one in ends) and apart(ends[0]) == 0.0


def replan_and_go_back() -> tuple[dict[str, Any], bool]:
    return replan(), go_back()


@pytest.mark.parametrize("sizes", [None, pytest.param([2, 1], marks=needs_machines)])
def test_new_layouts_and_a_return_to_an_earlier_step(sizes: list[int] | None) -> None:
    for replanned, same in ranks.spawn(replan_and_go_back, 3, init=True, machines=sizes):
        assert replanned["plans"] >= 3
        assert replanned["off"] < 1e-5
        assert replanned["apart"] == 0.0
        assert same
