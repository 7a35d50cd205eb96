"""Reference loops on several ranks, and the comparison of two trained models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.testing import workloads
from sapwood.testing.ranks import rank, world


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and with what."""

    workload: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    clip: float | None = None
    steps: int = 4

    def load(self) -> workloads.Workload:
        return workloads.by_name(self.workload, **self.options)

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(model.parameters(), **self.hyper)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    weights: list[Tensor]
    buffers: list[Tensor]
    buckets: tuple[tuple[str, ...], ...] = ()


def finish(model: nn.Module, losses: list[float], **more: Any) -> Result:
    return Result(
        losses,
        [p.detach().clone() for p in model.parameters()],
        [b.detach().clone() for b in model.buffers()],
        **more,
    )


def train_ddp(case: Case, **options: Any) -> Result:
    """DistributedDataParallel and the optimizer, as its documentation has it."""
    workload = case.load()
    model = workload.model()
    optimizer = case.make(model)
    wrapped = DistributedDataParallel(model, **options) if world() > 1 else model
    losses = []
    for step in range(case.steps):
        x, y = workload.batch(step, rank(), world())
        optimizer.zero_grad()
        loss = workload.loss(wrapped(x), y)
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        losses.append(loss.item())
    return finish(model, losses)


def train_ours(case: Case, **settings: Any) -> Result:
    workload = case.load()
    model = workload.model()
    losses = []
    with sapwood.Run(model, case.make(model), clip_grad_norm=case.clip, **settings) as run:
        for step in range(case.steps):
            x, y = workload.batch(step, rank(), world())
            loss = workload.loss(run.model(x), y)
            loss.backward()
            run.step()
            losses.append(loss.item())
        return finish(model, losses, buckets=run.buckets)


def train_by_hand(case: Case, buckets: Sequence[Sequence[str]], averaging: str) -> Result:
    """Backward, then one sum per bucket, then the optimizer.

    Through the memory of a machine, contributions are added in the order of ranks. gloo's order
    depends on where an element lies in the message, so a bit for bit reference of ``direct`` on
    more than two ranks must send messages of the same layout (flags included).
    """
    average = in_order_of_ranks if averaging == "node" else by_gloo
    workload = case.load()
    model = workload.model()
    optimizer = case.make(model)
    named = dict(model.named_parameters())
    losses = []
    for step in range(case.steps):
        x, y = workload.batch(step, rank(), world())
        optimizer.zero_grad()
        loss = workload.loss(model(x), y)
        loss.backward()
        for number, names in enumerate(buckets):
            last = number == len(buckets) - 1
            average([named[n] for n in names], flags=len(names) + 2 * last)
        optimizer.step()
        losses.append(loss.item())
    return finish(model, losses)


def by_gloo(parameters: list[nn.Parameter], flags: int) -> None:
    flat = torch.cat([_contribution(parameters), torch.ones(flags)])
    dist.all_reduce(flat)
    _put(parameters, flat)


def in_order_of_ranks(parameters: list[nn.Parameter], flags: int) -> None:
    mine = _contribution(parameters)
    everybody = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(everybody, mine)
    total = everybody[0]
    for flat in everybody[1:]:
        total = total + flat
    _put(parameters, total)


def _contribution(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.reshape(-1) * (1.0 / world()) for p in parameters])


def _put(parameters: list[nn.Parameter], flat: Tensor) -> None:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size


def distance(left: Result, right: Result) -> float:
    """The largest difference between weights; 0.0 means bit for bit."""
    pairs = zip(left.weights, right.weights, strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def replicas_differ(result: Result) -> float:
    """The largest difference between this rank's weights and buffers and rank 0's."""
    worst = 0.0
    for tensor in (*result.weights, *result.buffers):
        theirs = tensor.clone()
        if world() > 1:
            dist.broadcast(theirs, 0)
        worst = max(worst, (theirs.double() - tensor.double()).abs().max().item())
    return worst


Check = Callable[[Case], dict[str, float]]
