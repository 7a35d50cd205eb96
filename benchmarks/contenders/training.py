"""The training whose state is saved: the same model, batches and optimizer for every contender.

A model with its optimizer state and gradients is big, so contenders share one: those of PyTorch a
DistributedDataParallel, ours a Run. A checkpoint does not change what is trained.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from core.rank import Context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .sizes import source_of

Batch = tuple[Any, Any]
DISTINCT_BATCHES = 4


@dataclass
class Workload:
    source: Any
    batches: list[Batch]
    optimizer_name: str
    trainings: dict[type[Training], Training] = field(default_factory=dict)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer_name == "adam":
            return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        if self.optimizer_name == "plain":
            return torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def training(self, kind: type[Training], context: Context) -> Training:
        """The one training of its kind, made when first asked for."""
        if kind not in self.trainings:
            self.trainings[kind] = kind(self, context)
        return self.trainings[kind]


def prepare(context: Context) -> Workload:
    model = context.options["model"]
    source = source_of(model)
    batches = [source.batch(step, context.rank, context.world) for step in range(DISTINCT_BATCHES)]
    return Workload(source, batches, model["optimizer"])


class Training(ABC):
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.plain: nn.Module = workload.source.model()
        self.optimizer = workload.optimizer(self.plain)
        self.steps = 0

    def loss(self, model: nn.Module) -> Tensor:
        x, y = self.workload.batches[self.steps % len(self.workload.batches)]
        self.steps += 1
        loss: Tensor = self.workload.source.loss(model(x), y)
        return loss

    @abstractmethod
    def step(self) -> None: ...

    def timed_step(self) -> float:
        begun = time.perf_counter()
        self.step()
        return time.perf_counter() - begun

    def close(self) -> None:
        """Contenders share a training, so this may be called more than once."""
        return


class Ddp(Training):
    """DistributedDataParallel in the setting that was fastest in sync_step."""

    def __init__(self, workload: Workload, context: Context) -> None:
        super().__init__(workload)
        self.model = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        self.step()  # optimizers make their state in their first step

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self.loss(self.model).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Sapwood(Training):
    # A size, or the first 30 steps, which are all there are here, would measure buckets.
    bucket_mb = 25.0

    def __init__(self, workload: Workload, context: Context) -> None:
        import sapwood

        super().__init__(workload)
        settings = {"trace": False, "bucket_mb": self.bucket_mb}
        folder = context.scratch / "run"
        self.run = sapwood.Run(self.plain, self.optimizer, folder=folder, **settings)
        self.closed = False
        self.step()

    def step(self) -> None:
        self.loss(self.run.model).backward()
        self.run.step()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.run.close()


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor a checkpoint must hold, by name; the live ones, not copies."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, name, tensor in optimizer_tensors(optimizer):
        found[f"optim.{number}.{name}"] = tensor
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """Number of the parameter, name of the state, tensor."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        for name, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor):
                yield number, name, value


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(model, optimizer).values())


def byte_view(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Two states are equal bit for bit if these are."""
    return {
        name: xxhash.xxh3_128_hexdigest(byte_view(tensor).numpy())
        for name, tensor in state_tensors(model, optimizer).items()
    }


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Overwrites the state, so that a load that does nothing is found out."""
    with torch.no_grad():
        for tensor in state_tensors(model, optimizer).values():
            tensor.fill_(1)


def clones(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state_tensors(model, optimizer).items()}


def put_back(before: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for name, tensor in state_tensors(model, optimizer).items():
            tensor.copy_(before[name])


def make(
    contenders: Mapping[str, Callable[[Workload, Context], Any]],
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """Adds a contender; one that cannot be made is reported and does not end the rank."""
    try:
        made[name] = contenders[name](workload, context)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}
