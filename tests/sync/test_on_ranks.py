"""Several real ranks: what the engine promises while ranks differ from step to step."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}
TINY = {"first_bucket_mb": 1e-4, "bucket_mb": 1e-4}


def spread(model: nn.Module) -> float:
    """How far this rank's parameters and buffers are from rank 0's."""
    worst = 0.0
    for tensor in (*model.parameters(), *model.buffers()):
        theirs = tensor.detach().clone()
        dist.broadcast(theirs, 0)
        worst = max(worst, (theirs.double() - tensor.detach().double()).abs().max().item())
    return worst


def plain_ddp(model: nn.Module, steps: int, each: Any = None, **options: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    wrapped = DistributedDataParallel(model, **options)
    for step in range(steps):
        if each is not None:
            each(model, step)
        optimizer.zero_grad()
        x, y = models.batch(step, rank())
        models.loss_of(wrapped(x), y).backward()
        optimizer.step()
    return models.weights(model)


# -- events ------------------------------------------------------------------------------------


class Wait(torch.autograd.Function):
    """Its backward goes on only when ``gate`` is open."""

    gate: threading.Event | None = None
    waited: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Wait.gate is not None:
            Wait.waited.append(Wait.gate.wait(60))
        return gradient


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Wait.apply(torch.tanh(self.first(x))))


def update_inside_backward() -> tuple[list[bool], int]:
    model = models.seeded(Gated)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), **TINY) as run:
        models.train_run_step(run, 0)
        gate = threading.Event()

        def opened(event: sapwood.TensorUpdated) -> None:
            if "head.weight" in event.names:
                gate.set()

        run.events.subscribe(sapwood.TensorUpdated, opened, name="gate")
        for step in range(1, 4):
            gate.clear()
            Wait.gate = gate
            models.train_run_step(run, step)
        return Wait.waited, run.stats.early_updates


@pytest.mark.parametrize("world", [1, 2])
def test_the_head_is_updated_before_the_first_layers_gradient_exists(world: int) -> None:
    for waited, early in ranks.spawn(update_inside_backward, world, timeout=100):
        assert waited == [True] * 3
        assert early >= 3


def watch_immutability(update: str) -> dict[str, Any]:
    model = models.mlp(layers=6)
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    facts: dict[str, Any] = {"checks": 0, "changed": 0, "generations": {}, "steps": []}

    def before_update(**where: Any) -> None:
        for live, copy in seen.pop(where["bucket"], []):
            facts["checks"] += 1
            facts["changed"] += not torch.equal(live, copy)

    def updated(event: sapwood.TensorUpdated) -> None:
        tensors = [t for u in event.tensors for t in (u.tensor, *u.state.values())]
        seen[event.bucket] = [(t, t.clone()) for t in tensors]
        for item in event.tensors:
            facts["generations"].setdefault(item.name, []).append(item.generation)

    def ended(event: sapwood.StepEnded) -> None:
        facts["steps"].append(event.step)

    faults.arm("sync.update", before_update, at=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    with sapwood.Run(model, optimizer, update=update, **TINY) as run:
        run.events.subscribe(sapwood.TensorUpdated, updated)
        run.events.subscribe(sapwood.StepEnded, ended)
        for step in range(6):
            models.train_run_step(run, step)
        facts["buckets"] = len(run.buckets)
        facts["run"] = {n: run.generation(n) for n in facts["generations"]}
    faults.disarm_all()
    return facts


@pytest.mark.parametrize("update", ["layerwise", "deferred"])
def test_an_updated_tensor_keeps_its_value_until_its_next_update(update: str) -> None:
    for facts in ranks.spawn(watch_immutability, 2, update, timeout=100):
        assert facts["buckets"] > 3
        assert facts["checks"] >= 5 * 14 * 4  # five updates seen, 14 tensors, each with its state
        assert facts["changed"] == 0
        assert all(g == [1, 2, 3, 4, 5, 6] for g in facts["generations"].values())
        assert set(facts["run"].values()) == {6}
        assert facts["steps"] == [1, 2, 3, 4, 5, 6]


def hold_a_fence() -> dict[str, Any]:
    model = models.mlp()
    order: list[str] = []
    holds: list[sapwood.events.Hold] = []
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:

        def hold(event: sapwood.TensorUpdated) -> None:
            if not holds:

                def help_out() -> None:
                    order.append("assisted")
                    holds[0].release()

                holds.append(event.hold("copier", assist=help_out))

        run.events.subscribe(sapwood.TensorUpdated, hold, name="copier")
        faults.arm("sync.update", lambda **_: order.append("update"), at=None)
        models.train_run_step(run, 0)
        models.train_run_step(run, 1)
        faults.disarm_all()
        return {"order": order, "waits": dict(run.stats.fence_seconds)}


def test_an_update_waits_for_the_hold_and_lets_the_holder_finish() -> None:
    for facts in ranks.spawn(hold_a_fence, 2, timeout=100):
        assert facts["order"][:3] == ["update", "assisted", "update"]
        assert set(facts["waits"]) == {"copier"}


def buffers_agree() -> dict[str, Any]:
    model = models.seeded(models.Norms)
    got: list[dict[str, Tensor]] = []
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        run.events.subscribe(
            sapwood.BuffersUpdated,
            lambda e: got.append({k: v.clone() for k, v in e.buffers.items()}),
        )
        for step in range(3):
            models.train_run_step(run, step)
        same = all(torch.equal(v, run.tensors()[k]) for k, v in got[-1].items())
        return {"same": same, "count": len(got), "names": sorted(got[-1]), "last": got[-1]}


@pytest.mark.parametrize("world", [1, 3])
def test_buffers_have_an_event_of_their_own_and_agree(world: int) -> None:
    results = ranks.spawn(buffers_agree, world, timeout=100)
    for facts in results:
        assert facts["same"]
        assert facts["count"] == 3
        assert facts["names"] == [
            "norm.num_batches_tracked",
            "norm.running_mean",
            "norm.running_var",
        ]
        for name, value in facts["last"].items():
            assert torch.equal(value, results[0]["last"][name])


# -- steps that do not fit the plan --------------------------------------------------------------

PLANS = {
    "each rank its own branch": lambda r, s: ("left",) if r == 0 else ("right",),
    "one rank at times": lambda r, s: ("left", "right") if (r, s % 3) == (1, 0) else ("left",),
    "a branch that ends": lambda r, s: ("left", "right") if s < 3 else ("left",),
    "a branch that begins": lambda r, s: ("left",) if s < 3 else ("left", "right"),
    "taking turns": lambda r, s: (("left",), ("right",))[(s + r) % 2],
}


def branches(name: str) -> dict[str, Any]:
    choose = PLANS[name]

    def each(model: nn.Module, step: int) -> None:
        model.use = choose(rank(), step)

    expected = plain_ddp(models.seeded(models.Branches), 12, each, find_unused_parameters=True)
    model = models.seeded(models.Branches)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), **TINY) as run:
        for step in range(12):
            each(model, step)
            models.train_run_step(run, step)
        return {
            "same": models.same(expected, models.weights(model)),
            "spread": spread(model),
            "plans": run.stats.plans,
        }


@pytest.mark.parametrize("name", PLANS)
def test_branches_differ_by_rank_and_step(name: str) -> None:
    outcomes = ranks.spawn(branches, 2, name, init=True, timeout=100)
    for facts in outcomes:
        assert facts["same"]
        assert facts["spread"] == 0.0
    assert outcomes[0]["plans"] == outcomes[1]["plans"]


def no_backward_on_one_rank() -> tuple[float, list[bool]]:
    model = models.mlp()
    skipped = []
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), **TINY) as run:
        for step in range(6):
            x, y = models.batch(step, rank())
            if (rank(), step) not in {(0, 0), (1, 2), (0, 4), (1, 4)}:
                models.loss_of(run.model(x), y).backward()
            skipped.append(run.step().skipped)
        return spread(model), skipped


def test_a_rank_may_skip_a_batch() -> None:
    for difference, skipped in ranks.spawn(no_backward_on_one_rank, 2, init=True, timeout=100):
        assert difference == 0.0
        assert skipped == [False, False, False, False, True, False]


def accumulate() -> bool:
    def data(step: int, part: int) -> tuple[Tensor, Tensor]:
        return models.batch(10 * step + part, rank())

    plain = models.mlp()
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    wrapped = DistributedDataParallel(plain)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            for part in range(2):
                x, y = data(step, part)
                models.loss_of(wrapped(x), y).backward()
        x, y = data(step, 2)
        models.loss_of(wrapped(x), y).backward()
        optimizer.step()
    same = True
    for engine in ("layerwise", "ddp"):
        ours = models.mlp()
        with sapwood.Run(ours, torch.optim.SGD(ours.parameters(), **SGD), engine=engine) as run:
            for step in range(4):
                with run.accumulate():
                    for part in range(2):
                        x, y = data(step, part)
                        models.loss_of(run.model(x), y).backward()
                x, y = data(step, 2)
                models.loss_of(run.model(x), y).backward()
                run.step()
        same &= models.same(models.weights(plain), models.weights(ours))
    return same


def test_accumulation_equals_ddps_no_sync() -> None:
    assert ranks.spawn(accumulate, 2, init=True, timeout=100) == [True, True]


def scale() -> tuple[list[bool], float]:
    model = models.mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    skipped = []
    with sapwood.Run(model, optimizer, scaler=scaler, clip_grad_norm=0.5) as run:
        for step in range(3):
            x, y = models.batch(step, rank())
            bad = float("inf") if (rank(), step) == (1, 1) else 1.0
            scaler.scale(models.loss_of(run.model(x), y) * bad).backward()
            skipped.append(run.step().skipped)
        return skipped, spread(model)


def test_inf_on_one_rank_skips_the_step_on_all() -> None:
    for skipped, difference in ranks.spawn(scale, 2, init=True, timeout=100):
        assert skipped == [False, True, False]
        assert difference == 0.0


def mixed_dtypes() -> tuple[float, int]:
    model = models.mlp()
    model[2].to(torch.bfloat16)

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            for part in self.inner:
                weight = getattr(part, "weight", None)
                x = part(x if weight is None else x.to(weight.dtype))
            return x

    wrapped = Cast(model)
    with sapwood.Run(wrapped, torch.optim.SGD(wrapped.parameters(), **SGD)) as run:
        for step in range(3):
            models.train_run_step(run, step)
        return spread(wrapped), len(run.buckets)


def test_buckets_hold_one_dtype_each() -> None:
    for difference, buckets in ranks.spawn(mixed_dtypes, 2, init=True, timeout=100):
        assert difference == 0.0
        assert buckets == 3


def thaw() -> tuple[float, int, bool]:
    model = models.mlp()
    model[0].requires_grad_(False)
    first = model[0].weight.detach().clone()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD)) as run:
        for step in range(2):
            models.train_run_step(run, step)
        kept = torch.equal(first, model[0].weight)
        model[0].requires_grad_(True)
        for step in range(2, 4):
            models.train_run_step(run, step)
        return spread(model), run.stats.plans, kept and not torch.equal(first, model[0].weight)


def test_thawed_parameters_are_averaged_too() -> None:
    assert ranks.spawn(thaw, 2, init=True, timeout=100) == [(0.0, 2, True)] * 2
