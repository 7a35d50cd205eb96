"""What runs inside the ranks of sync_step.py: every way to train one step, on equal terms.

Each contender has its own copy of the model, made from the same seed, sees the same batches in the
same order, and uses the same fused optimizer kernels. Gradients are dropped, not zeroed.
"""

from __future__ import annotations

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core import pmi
from core.rank import Context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .events import EarlyUpdates, announce_seconds

Batch = tuple[Any, Any]
DISTINCT_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A workload of ``sapwood.testing.workloads`` with its batches made ahead of time."""

    source: Any
    batches: list[Batch]
    adam: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.source.model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def prepare(context: Context) -> Workload:
    from sapwood.testing import workloads

    name = context.options["workload"]
    source = workloads.by_name(name, **context.options["settings"])
    batches = [source.batch(step, context.rank, context.world) for step in range(DISTINCT_BATCHES)]
    return Workload(source, batches, adam=name == "transformer")


class Trainer(ABC):
    """One contender; calling it trains one step."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.plain = workload.model()
        self.steps = 0

    def batch(self) -> Batch:
        self.steps += 1
        return self.workload.batches[(self.steps - 1) % len(self.workload.batches)]

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.plain.parameters()]

    @abstractmethod
    def __call__(self) -> None: ...


class Local(Trainer):
    """No communication: forward, backward and update in each rank by itself."""

    def __init__(self, workload: Workload, context: Context) -> None:
        super().__init__(workload)
        self.model: nn.Module = self.plain
        self.optimizer = workload.optimizer(self.plain)

    def __call__(self) -> None:
        x, y = self.batch()
        self.workload.source.loss(self.model(x), y).backward()
        self.exchange()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def exchange(self) -> None:
        """Nothing to exchange: a replica of its own."""


class NoOverlap(Local):
    """All gradients in one bucket, averaged after backward has ended."""

    def __init__(self, workload: Workload, context: Context) -> None:
        super().__init__(workload, context)
        self.world = context.world
        parameters = [p for p in self.plain.parameters() if p.requires_grad]
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [(p, piece.view_as(p)) for p, piece in zip(parameters, pieces, strict=True)]

    def exchange(self) -> None:
        for parameter, view in self.views:
            assert parameter.grad is not None
            torch.mul(parameter.grad, 1 / self.world, out=view)
            parameter.grad = view
        self.average()

    def average(self) -> None:
        dist.all_reduce(self.flat)


class MpiAllreduce(NoOverlap):
    """The same by MPI, which goes through shared memory between ranks of a machine."""

    def __init__(self, workload: Workload, context: Context) -> None:
        super().__init__(workload, context)
        with pmi.managed():
            from mpi4py import MPI
        self.comm, self.in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        if (self.comm.rank, self.comm.size) != (context.rank, context.world):
            raise RuntimeError(f"MPI has rank {self.comm.rank} of {self.comm.size}")
        self.comm.Barrier()  # all have mapped it
        unname_shared_memory()

    def average(self) -> None:
        self.comm.Allreduce(self.in_place, self.flat.numpy())


def unname_shared_memory() -> None:
    """MPICH removes its segments when it ends in order; a benchmark that is killed does not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[5] for line in lines if "/mpich_shm_" in line}
    for name in names:
        Path(name).unlink(missing_ok=True)


class Ddp(Local):
    """DistributedDataParallel, whose backward returns when every gradient is averaged."""

    def __init__(self, workload: Workload, context: Context, **settings: bool) -> None:
        super().__init__(workload, context)
        self.model = DistributedDataParallel(self.plain, **settings)


class Sapwood(Trainer):
    def __init__(self, workload: Workload, context: Context, folder: str, **settings: Any) -> None:
        import sapwood

        super().__init__(workload)
        self.folder = folder
        self.run = sapwood.Run(
            self.plain,
            workload.optimizer(self.plain),
            folder=context.scratch / folder,
            trace=False,
            **settings,
        )

    def __call__(self) -> None:
        x, y = self.batch()
        self.workload.source.loss(self.run.model(x), y).backward()
        self.run.step()

    def close(self) -> None:
        self.run.close()


class Subscribed(Sapwood):
    """Ours with a subscriber that does nothing, unless it is asked to observe."""

    def __init__(self, workload: Workload, context: Context, folder: str) -> None:
        import sapwood

        super().__init__(workload, context, folder)
        self.early = EarlyUpdates(self.plain)
        self.run.events.subscribe(sapwood.TensorUpdated, self.early.updated, name="observer")


def ddp(**settings: bool) -> Callable[[Workload, Context], Trainer]:
    return lambda workload, context: Ddp(workload, context, **settings)


CONTENDERS: dict[str, Callable[[Workload, Context], Trainer]] = {
    "sapwood": lambda workload, context: Sapwood(workload, context, "plain"),
    "sapwood direct": lambda workload, context: Sapwood(
        workload, context, "direct", averaging="direct"
    ),
    "sapwood+subscriber": lambda workload, context: Subscribed(workload, context, "subscribed"),
    "ddp": ddp(),
    "ddp static": ddp(static_graph=True),
    "ddp view": ddp(gradient_as_bucket_view=True),
    "ddp static+view": ddp(static_graph=True, gradient_as_bucket_view=True),
    "mpi4py": MpiAllreduce,
    "no overlap": NoOverlap,
    "local": Local,
}


def differences(made: dict[str, Trainer], reference: Trainer) -> Iterator[tuple[str, Trainer]]:
    """Contenders whose weights must equal the reference's: all that exchange gradients."""
    for name, trainer in made.items():
        if trainer is not reference and type(trainer) is not Local:
            if trainer.steps != reference.steps:
                raise RuntimeError(f"{name}: {trainer.steps} steps, not {reference.steps}")
            yield name, trainer


def compare(
    workload: Workload, context: Context, made: dict[str, Trainer], reference: str
) -> dict[str, Any]:
    """Distance of each contender's weights from the reference's after the same steps.

    Relative to how far training moved the weights, as a whole and for the worst tensor: an absolute
    difference alone cannot tell rounding from a bucket that was never updated.
    """
    target = made[reference].weights()
    start = [parameter.detach() for parameter in workload.model().parameters()]
    moves = list(map(torch.sub, target, start))
    found = {}
    for name, trainer in differences(made, made[reference]):
        gaps = list(map(torch.sub, trainer.weights(), target))
        found[name] = {
            "max_abs": max(float(gap.abs().max()) for gap in gaps),
            "moved": norm(gaps) / norm(moves),
            "worst": max(relative(gap, move) for gap, move in zip(gaps, moves, strict=True)),
            "frozen": frozen(trainer.weights(), start, target),
        }
    return {"steps": made[reference].steps, "contenders": found}


def relative(gap: Tensor, move: Tensor) -> float:
    return float(gap.norm() / move.norm()) if bool(gap.any()) else 0.0


def frozen(weights: list[Tensor], start: list[Tensor], target: list[Tensor]) -> int:
    """Tensors that were never updated although the reference updated them."""
    rows = zip(weights, start, target, strict=True)
    return sum(torch.equal(now, first) and not torch.equal(to, first) for now, first, to in rows)


def norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([t.double().norm() for t in tensors])))


def gradient_bytes(workload: Workload, context: Context, made: dict[str, Trainer]) -> int:
    """What an all-reduce has to average in a step."""
    return sum(p.numel() * p.element_size() for p in workload.model().parameters())


def observe(
    workload: Workload, context: Context, made: dict[str, Trainer], contender: str, steps: int
) -> dict[str, list[float]]:
    """Shares of buckets and bytes updated before the last gradient of a step, per step."""
    trainer = made[contender]
    assert isinstance(trainer, Subscribed)
    with trainer.early.watching():
        for _ in range(steps):
            trainer()
    buckets, sizes = zip(*trainer.early.shares(), strict=True)
    return {"early_share": list(buckets), "early_bytes": list(sizes)}


def settle(
    workload: Workload, context: Context, made: dict[str, Trainer], contender: str
) -> str | None:
    """Train on until bucket sizes are chosen: a run's first steps are not like the others."""
    trainer = made[contender]
    assert isinstance(trainer, Sapwood)
    while trainer.run.tuner.measuring:
        trainer()
    return trainer.run.tuner.learned


def averaging(
    workload: Workload, context: Context, made: dict[str, Trainer], contender: str
) -> str | None:
    """How ours averages here, as the run's own folder says; rank 0 writes it."""
    trainer = made[contender]
    assert isinstance(trainer, Sapwood)
    facts = context.scratch / trainer.folder / trainer.run.id / "run.toml"
    return tomllib.loads(facts.read_text()).get("layout", {}).get("averaging")


def events_cost(
    workload: Workload, context: Context, made: dict[str, Trainer], contender: str
) -> dict[str, float]:
    """Seconds a step spends on events nobody subscribed to (an upper bound, see events.py)."""
    trainer = made[contender]
    assert isinstance(trainer, Subscribed)
    return {"seconds": announce_seconds(trainer.early.last_step())}
