"""Models that look like those people train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from sapwood.testing.ranks import rank
from tests.parity.harness import Case, Trainer, batch, loss_of, sgd


class Tied(nn.Module):
    """One matrix is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x > 0).long() + 2 * (x > 1).long()
        return self.head(self.layer(self.embed(words)).mean(1))


class Experts(nn.Module):
    """Top-1 routing of rows; an expert nobody chose has no gradient in that step."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(16, 16), nn.Linear(16, count)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        share, choice = F.softmax(self.gate(x), -1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = choice == number
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.head(x + share[:, None] * out)


class Waking(nn.Module):
    """Parts of other dtypes that are used from step 3 on only, some on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.parts = nn.ModuleList(
            nn.Linear(16, 16).to(d) for d in (torch.float64, torch.bfloat16, torch.float32)
        )
        self.use: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for number in self.use:
            part = self.parts[number]
            x = x + part(x.to(part.weight.dtype)).to(x.dtype)
        return self.head(x)


def wake(trainer: Trainer, step: int) -> Tensor:
    model = trainer.inner
    assert isinstance(model, Waking)
    if step >= 2:
        model.use = (0, 1) if (step + rank()) % 2 else (1, 2)
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


def waking_from_the_start() -> nn.Module:
    model = Waking()
    model.use = (0, 1, 2)
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.stem(x)) * self.filter, n=16)
        return self.head(torch.tanh(x))


class Words(nn.Module):
    """Rows as sequences of four tokens of width four."""

    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(4, 8), body, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 4, 4))
        if isinstance(self.body, nn.MultiheadAttention):
            x = self.body(x, x, x, need_weights=False)[0]
        elif isinstance(self.body, nn.Transformer):
            x = self.body(x, x.flip(1))
        elif isinstance(self.body, (nn.LSTM, nn.GRU)):
            x = self.body(x)[0]
        return self.head(x.mean(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 4).to(self.head.weight.dtype)
        if self.body[0].weight.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.body(x).mean((2, 3)))


def weight_norm() -> nn.Module:
    model = mlp()
    for number in (0, 2):
        parametrizations.weight_norm(model[number])
    return model


def spectral_norm() -> nn.Module:
    model = mlp()
    for number in (0, 2):
        parametrizations.spectral_norm(model[number])
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def cached_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    with parametrize.cached():
        loss = loss_of(trainer.model(x), y) + loss_of(trainer.model(x + 1), y)
    loss.backward()
    trainer.end()
    return loss


def autocast_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    with torch.autocast("cpu", torch.bfloat16):
        output = trainer.model(x)
    loss = loss_of(output, y)
    loss.backward()
    trainer.end()
    return loss


class MaxNorm(nn.Module):
    """Weights are limited in forward by giving the parameter other memory (EEGNet does this)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for part in (self.second, self.head):
                part.weight.data = torch.renorm(part.weight.data, p=2, dim=0, maxnorm=0.5)
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Adapters(nn.Module):
    """A frozen base with trained additions; the head is frozen too."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return self.head(x)


def adapters_only(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


class Shapes(nn.Module):
    """A scalar, an empty one, one that is not contiguous, and one of many dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(16, 16).t())
        self.deep = nn.Parameter(torch.randn(2, 2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) @ self.turned * self.scale + self.deep.view(-1)
        return self.head(x) + self.nothing.sum()


def bfloat16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def transformer() -> nn.Module:
    return Words(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True))


def cast_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x.to(torch.bfloat16)), y)
    loss.backward()
    trainer.end()
    return loss


CASES: dict[str, Case] = {
    "tied": Case(build=Tied),
    "experts": Case(build=Experts, unused=True, steps=8),
    "experts, Adam": Case(
        build=Experts,
        unused=True,
        steps=8,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "mixed dtypes": Case(build=waking_from_the_start),
    "mixed dtypes that wake": Case(build=Waking, unused=True, step=wake, steps=9),
    "complex": Case(build=Complex, by_hand=True),
    "complex, Adam": Case(
        build=Complex, by_hand=True, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)
    ),
    "attention": Case(build=lambda: Words(nn.MultiheadAttention(8, 2, batch_first=True))),
    "lstm": Case(build=lambda: Words(nn.LSTM(8, 8, num_layers=2, batch_first=True))),
    "gru, both directions": Case(
        build=lambda: Words(nn.GRU(8, 8, bidirectional=True, batch_first=True), width=16)
    ),
    "transformer": Case(build=transformer),
    "transformer, eval mode": Case(build=transformer, evaluating=True),
    "images": Case(build=Images),
    "images, channels_last": Case(build=lambda: Images().to(memory_format=torch.channels_last)),
    "bfloat16": Case(build=lambda: bfloat16(mlp()), step=cast_step),
    "bfloat16 images": Case(build=lambda: bfloat16(Images())),
    "float64": Case(build=lambda: Images().double()),
    "autocast": Case(build=mlp, step=autocast_step),
    "autocast, lstm": Case(
        build=lambda: Words(nn.LSTM(8, 8, batch_first=True)), step=autocast_step
    ),
    "weight_norm": Case(build=weight_norm),
    "weight_norm, cached": Case(build=weight_norm, step=cached_step, by_hand=True),
    "spectral_norm": Case(build=spectral_norm),
    "max norm by .data": Case(build=MaxNorm),
    "max norm by .data, fused": Case(build=MaxNorm, optimizer=lambda m: sgd(m, fused=True)),
    "adapters": Case(build=Adapters, optimizer=adapters_only),
    "adapters, optimizer holds all": Case(build=Adapters),
    "odd shapes": Case(build=Shapes),
}
