"""Small models with one difficulty each, and plain training loops to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sapwood import Run


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def mlp(width: int = 16, layers: int = 4) -> nn.Module:
    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*parts, nn.Linear(width, 4))

    return seeded(build)


def batch(step: int, rank: int = 0, rows: int = 8, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class Norms(nn.Module):
    """Convolutions with BatchNorm: buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x[:, None]))).flatten(1))


class Branches(nn.Module):
    """Two branches; only the chosen ones are used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.use: tuple[str, ...] = ("left", "right")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for name in self.use:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


class Shared(nn.Module):
    """One layer used twice, in checkpointed segments if asked."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.reentrant = reentrant

    def _twice(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.reentrant is None:
                x = torch.tanh(self.body(x))
            else:
                x = checkpoint(lambda t: torch.tanh(self.body(t)), x, use_reentrant=self.reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._twice(self.first(x)))


class Detached(nn.Module):
    """An earlier layer reads a later layer's weight behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.late = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(x @ self.late.weight.detach().t())
        return self.head(torch.tanh(self.late(x)))


def train_plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    return train_plain(model, optimizer, 1, start=step)


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
) -> list[float]:
    """What everybody writes by hand, on one rank."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part)
            loss = loss_of(model(x), y)
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_run_step(run: Run, step: int) -> list[float]:
    x, y = batch(step, run.rank)
    loss = loss_of(run.model(x), y)
    loss.backward()
    run.step()
    return [loss.item()]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )
