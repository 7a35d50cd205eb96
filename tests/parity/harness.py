"""One training loop, run by plain PyTorch and by each engine, and what the comparison found.

A case is a model, an optimizer and one step of a loop, written once against ``Trainer``. The
reference is DistributedDataParallel and the optimizer (on one rank, the plain loop), or, where DDP
itself cannot train such a model, gradients averaged by hand: on two ranks a sum has one order, so
both have the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.errors import SapwoodError
from sapwood.testing.ranks import rank, world

ENGINES: dict[str, dict[str, Any]] = {
    "layerwise": {},
    "deferred": {"update": "deferred"},
    "ddp": {"engine": "ddp"},
}
# Small buckets, so that a small model has many and most are updated early.
TINY = {"first_bucket_mb": 1e-4, "bucket_mb": 1e-4}
PEER_TIMEOUT = 10.0


class Trainer(ABC):
    """What a loop needs; ``ours`` tells whether a Run is behind it."""

    ours = False

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1 + rank())  # dropout and the like: the same in every variant
        self.case = case
        self.inner = seeded(case.build)
        self.inner.train(not case.evaluating)
        self.optimizer = case.optimizer(self.inner)
        self.scaler = case.scaler() if case.scaler is not None else None
        self.model: Callable[..., Any] = self.inner
        self.kept: dict[str, Any] = {}
        self.extra: list[Tensor] = []
        if case.prepare is not None:
            case.prepare(self)

    @abstractmethod
    def accumulate(self, active: bool = True) -> AbstractContextManager[None]:
        """Around forward and backward."""

    def settle(self) -> None:  # noqa: B027 - a loop by hand has nothing to wait for
        """Wait for what backward began."""

    @abstractmethod
    def end(self) -> None:
        """What stands in the loop after backward."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how. The fields a case leaves alone are those of the simplest loop."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(default=lambda m: sgd(m))
    step: Callable[[Trainer, int], Tensor | None] = field(default=lambda t, s: simple_step(t, s))
    prepare: Callable[[Trainer], None] | None = None
    """Called once with the model and the optimizer, before they are wrapped."""
    attach: Callable[[Trainer], None] | None = None
    """Called once after they are wrapped."""
    steps: int = 4
    evaluating: bool = False
    clip: float | None = None
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    unused: bool = False
    """Some parameters have no gradient in some steps: DDP needs to be told, engine ddp refuses."""
    by_hand: bool = False
    """DDP cannot train this; the reference averages by hand."""
    skip: tuple[str, ...] = ()
    """Engines this is not for."""
    refused: dict[str, str] = field(default_factory=dict)
    """By engine, what the message must hold: here going on would be wrong."""
    may_refuse: tuple[str, ...] = ()
    """Engines that may refuse this with an error of their own, or do it right."""
    may_raise: str = ""
    """What an error of PyTorch may say in those engines, where only PyTorch can notice."""
    worlds: tuple[int, ...] = (1, 2)
    settings: dict[str, Any] = field(default_factory=dict)

    def engines(self, ranks: int) -> list[str]:
        # On one rank there is nothing for DDP to do: engine ddp is then the other engine.
        alone = ranks == 1 or self.unused or self.by_hand
        gone = {*self.skip, *(("ddp",) if alone else ())}
        return [name for name in ENGINES if name not in gone]


# -- what cases are made of --------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def batch(step: int, rows: int = 8, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank())
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def simple_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


class Pause(torch.autograd.Function):
    """Its backward gives an engine the time to do something wrong.

    It waits until a watched tensor has changed, but not for long: where all is right none does.
    """

    limit = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, *watched: Callable[[], Tensor]) -> Tensor:
        ctx.watched = [(get, get().detach().clone()) for get in watched]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        deadline = time.monotonic() + Pause.limit
        while time.monotonic() < deadline:
            if any(not torch.equal(get().detach(), old) for get, old in ctx.watched):
                break
            time.sleep(0.001)
        return (gradient, *(None for _ in ctx.watched))


def pause(x: Tensor, *watched: Callable[[], Tensor]) -> Tensor:
    paused: Tensor = Pause.apply(x, *watched)
    return paused


# -- the variants ------------------------------------------------------------------------------


class Reference(Trainer):
    """DistributedDataParallel as its documentation has it; by hand where that is not possible."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._by_hand = case.by_hand and world() > 1
        self._wrapped: DistributedDataParallel | None = None
        if world() > 1 and not case.by_hand:
            self._wrapped = DistributedDataParallel(self.inner, find_unused_parameters=case.unused)
            self.model = self._wrapped
        if case.attach is not None:
            case.attach(self)

    def begin(self) -> None:
        if self._by_hand:
            for buffer in self.inner.buffers():
                dist.broadcast(buffer.data, 0)

    def accumulate(self, active: bool = True) -> AbstractContextManager[None]:
        if active and self._wrapped is not None:
            return self._wrapped.no_sync()
        return contextlib.nullcontext()

    def end(self) -> None:
        if self._by_hand:
            self._average()
        self._update()
        self.optimizer.zero_grad()

    def _update(self) -> None:
        case, parameters = self.case, self.inner.parameters()
        if self.scaler is None:
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, case.clip)
            self.optimizer.step()
            return
        self.scaler.unscale_(self.optimizer)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _average(self) -> None:
        for parameter in self.inner.parameters():
            used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(used)
            if not used.item():
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = mine.detach() * (1.0 / world())
            dist.all_reduce(torch.view_as_real(mean) if mean.is_complex() else mean)
            parameter.grad = mean


class Ours(Trainer):
    ours = True

    def __init__(self, case: Case, engine: str) -> None:
        super().__init__(case)
        settings = {"timeout": PEER_TIMEOUT, **TINY, **ENGINES[engine], **case.settings}
        if case.clip is not None:
            settings["clip_grad_norm"] = case.clip
        self.engine = engine
        self.run = sapwood.Run(self.inner, self.optimizer, scaler=self.scaler, **settings)
        self.model = self.run.model
        if case.attach is not None:
            case.attach(self)

    def begin(self) -> None:
        pass

    def accumulate(self, active: bool = True) -> AbstractContextManager[None]:
        return self.run.accumulate() if active else contextlib.nullcontext()

    def end(self) -> None:
        self.run.step()

    def settle(self) -> None:
        self.run.wait()


@dataclass(frozen=True)
class Result:
    losses: list[float]
    weights: list[Tensor]
    buffers: list[Tensor]
    extra: list[Tensor]


def train(trainer: Reference | Ours) -> Result:
    losses = []
    for step in range(trainer.case.steps):
        trainer.begin()
        loss = trainer.case.step(trainer, step)
        losses.append(math.nan if loss is None else float(loss.detach()))
    return Result(
        losses,
        [p.detach().clone() for p in trainer.inner.parameters()],
        [b.detach().clone() for b in trainer.inner.buffers()],
        [t.detach().clone() for t in trainer.extra],
    )


# -- the comparison ----------------------------------------------------------------------------


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = [(_wide(a), _wide(b)) for a, b in zip(left, right, strict=False) if a.numel()]
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def from_rank0(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [t.clone(memory_format=torch.contiguous_format) for t in tensors]
    for copy in copies:
        if world() > 1:
            dist.broadcast(torch.view_as_real(copy) if copy.is_complex() else copy, 0)
    return copies


def compare(case: Case) -> dict[str, dict[str, Any]]:
    """What each engine came to, by engine; the reference itself must not fail."""
    Pause.limit = 0.0
    reference = train(Reference(case))
    facts: dict[str, dict[str, Any]] = {}
    for engine in case.engines(world()):
        Pause.limit = 0.02 if engine != "deferred" else 0.0
        ours, error = attempt(case, engine)
        if world() > 1:
            dist.barrier()
        here = facts[engine] = {"error": error}
        failed = torch.tensor(float(ours is None))
        if world() > 1:
            dist.all_reduce(failed)
        if ours is None or failed.item():
            here["error"] = error or {"type": "other rank", "text": "failed on another rank"}
            continue
        here |= {
            "weights": distance(reference.weights, ours.weights),
            "same weights": equal(reference.weights, ours.weights),
            "same losses": _same_losses(reference.losses, ours.losses),
            "same extra": equal(reference.extra, ours.extra),
            "replicas": equal(ours.weights, from_rank0(ours.weights)),
            # DDP gives rank 0's buffers to the others at the start of the next forward.
            "same buffers": equal(
                from_rank0(reference.buffers),
                from_rank0(ours.buffers) if engine == "ddp" else ours.buffers,
            ),
        }
    return facts


def attempt(case: Case, engine: str) -> tuple[Result | None, dict[str, Any] | None]:
    trainer: Ours | None = None
    error: BaseException | None = None
    try:
        trainer = Ours(case, engine)
        return train(trainer), None
    except Exception as problem:
        error = problem
        return None, {
            "type": type(problem).__name__,
            "own": isinstance(problem, SapwoodError),
            "text": str(problem),
            "trace": traceback.format_exc(limit=-6),
        }
    finally:
        if trainer is not None:
            trainer.run.close(error)
        error = trainer = None


def _same_losses(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True)
    )


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """A process group for the reference, in which a rank that went astray is not waited for."""
    if world() == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare_all(cases: dict[str, Case]) -> dict[str, Any]:
    """Facts by case and engine; cases share the processes, since those are what takes time."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    with joined():
        for name, case in cases.items():
            if world() not in case.worlds:
                continue
            start = time.perf_counter()
            try:
                found[name] = compare(case)
            except Exception:
                found[name] = {"reference": traceback.format_exc()}
                if world() > 1:  # the ranks may be in different places: nothing more can be said
                    return found
            found[name]["seconds"] = time.perf_counter() - start
    return found
