"""A training with everything a checkpoint must bring back, in one rank or several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sapwood
from tests.sync import models

TINY = {"first_bucket_mb": 1e-3, "bucket_mb": 1e-3}


class Model(nn.Module):
    """BatchNorm (buffers), dropout (random state), a frozen layer, and channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 64)
        self.head = nn.Linear(64, 4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(F.dropout(F.relu(self.wide(self.frozen(y))), 0.3, self.training))


def make_model(*, frozen: bool) -> Model:
    model = models.seeded(Model)
    assert isinstance(model, Model)
    model.frozen.requires_grad_(not frozen)
    return model.to(memory_format=torch.channels_last)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    half = len(trained) // 2
    return torch.optim.AdamW([{"params": trained[:half]}, {"params": trained[half:], "lr": 3e-3}])


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 3, 6, 6, generator=generator)
    return x, torch.randint(0, 4, (4,), generator=generator)


class Training:
    """A run with a scheduler, stepped one step at a time."""

    def __init__(
        self, folder: Path, kind: str = "adamw", *, frozen: bool = True, **settings: Any
    ) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        torch.manual_seed(100 + self.rank)
        self.model = make_model(frozen=frozen)
        self.optimizer = make_optimizer(kind, self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.run = sapwood.Run(
            self.model,
            self.optimizer,
            schedulers=[self.scheduler],
            folder=folder / "runs",
            **{**TINY, **settings},
        )

    def step(self) -> float:
        x, y = batch(self.run.step_count, self.rank)
        loss = F.cross_entropy(self.run.model(x), y)
        loss.backward()
        self.run.step()
        return float(loss.detach())

    def steps(self, until: int) -> list[float]:
        return [self.step() for _ in range(self.run.step_count, until)]

    def state(self) -> dict[str, Tensor]:
        """Everything a step leaves behind, by name."""
        found = {n: t.detach().clone() for n, t in self.run.tensors().items() if n != "scratch"}
        for n, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{n}/{key}"] = torch.as_tensor(value).clone()
        found["random"] = torch.get_rng_state()
        found["lr"] = torch.tensor([g["lr"] for g in self.optimizer.param_groups])
        return found

    def close(self) -> None:
        self.run.close()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
