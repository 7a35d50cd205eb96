"""Buffers: what forward changes, and what back-propagation still needs of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sapwood.testing.ranks import rank
from tests.parity.harness import Case, Trainer, batch, loss_of, pause


class Running(nn.Module):
    """``use`` updates a running value and computes with it; a slow layer comes after."""

    def __init__(self, use: Callable[[Running, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.use(self, torch.tanh(self.first(x)))
        self.count += 1
        x = pause(x, lambda: self.scale)
        return self.head(torch.tanh(self.second(x)))


def in_place(model: Running, x: Tensor) -> Tensor:
    model.scale.mul_(0.5).add_(x.detach().abs().mean(0))
    return x * model.scale


def through_data(model: Running, x: Tensor) -> Tensor:
    model.scale.data.mul_(0.5).add_(x.detach().abs().mean(0))
    return x * model.scale


def rebound(model: Running, x: Tensor) -> Tensor:
    model.scale = 0.5 * model.scale + x.detach().abs().mean(0)
    return x * model.scale


def rebound_before_use(model: Running, x: Tensor) -> Tensor:
    old = model.scale
    model.scale = 0.5 * old + x.detach().abs().mean(0)
    return x * old - model.scale


def read_before_write(model: Running, x: Tensor) -> Tensor:
    """The old value is used (a copy of it), the new one is for the next step."""
    out = x * model.scale.clone()
    model.scale.lerp_(x.detach().abs().mean(0), 0.5)
    return out


def used_twice(model: Running, x: Tensor) -> Tensor:
    model.scale.mul_(0.5).add_(x.detach().abs().mean(0))
    return torch.tanh(x * model.scale) * model.scale


def never_changed(model: Running, x: Tensor) -> Tensor:
    return x * model.scale


class Owner(nn.Module):
    """A part that owns a buffer; the model around it may be in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("cache", torch.arange(16.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean + 0.01 * self.cache


def with_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), Owner(), nn.Linear(16, 4)
    )


def frozen_norm() -> nn.Module:
    model = with_norm()
    model[1].requires_grad_(False)
    return model


def keep_frozen(*places: int) -> Callable[[Trainer, int], Tensor]:
    def step(trainer: Trainer, number: int) -> Tensor:
        for place in places:
            trainer.inner.get_submodule(str(place)).eval()
        x, y = batch(number)
        loss = loss_of(trainer.model(x), y)
        loss.backward()
        trainer.end()
        return loss

    return step


def modes_change(trainer: Trainer, step: int) -> Tensor:
    """Statistics are trained for two steps and frozen from then on."""
    if step == 2:
        trainer.inner.get_submodule("1").eval()
        trainer.inner.get_submodule("3").eval()
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


def validates(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    trainer.inner.eval()
    with torch.no_grad():
        value = loss_of(trainer.model(x), y)
    trainer.inner.train()
    return value


def rank0_validates(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    if rank() == 0:
        trainer.inner.eval()
        model = trainer.model if trainer.ours else trainer.inner  # DDP's own forward would hang
        with torch.no_grad():
            loss = loss_of(model(x), y)
        trainer.inner.train()
    return loss


class Queue(nn.Module):
    """Negatives of earlier batches in a buffer, and a second network that follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", torch.randn(8, 24))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.1)
            keys = self.key(x)
        queries = self.query(x)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone()], dim=1)
        start = int(self.place)
        self.queue[:, start : start + len(x)] = keys.t()
        self.place[0] = (start + len(x)) % 24
        return logits


def labels_step(trainer: Trainer, step: int) -> Tensor:
    x, _ = batch(step)
    logits = trainer.model(x)
    loss = loss_of(logits, torch.zeros(len(x), dtype=torch.long))
    loss.backward()
    trainer.end()
    return loss


class Codebook(nn.Module):
    """Vector quantisation with an average per code, updated after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(16, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        picked = self.codes[nearest]
        if self.training:
            self.codes.index_add_(0, nearest, 0.05 * (x.detach() - picked))
        return self.head(x + (picked - x).detach()) + ((x - picked) ** 2).mean()


class Named(nn.Module):
    """One buffer under two names, as tied rotary caches are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Owner(), Owner()
        self.second.mean = self.first.mean
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.body(self.first(x)))))


USES = {
    "updated in place": in_place,
    "updated through .data": through_data,
    "rebound": rebound,
    "rebound, old one used": rebound_before_use,
    "read, then written": read_before_write,
    "used twice": used_twice,
    "never changed": never_changed,
}
CASES: dict[str, Case] = {
    name: Case(build=partial(Running, use), steps=5) for name, use in USES.items()
}
CASES |= {
    f"{name}, eval mode": Case(build=partial(Running, USES[name]), steps=5, evaluating=True)
    for name in ("updated in place", "rebound")
}
CASES |= {
    "BatchNorm": Case(build=with_norm),
    "BatchNorm frozen": Case(build=frozen_norm, step=keep_frozen(1)),
    "all owners of buffers in eval mode": Case(build=frozen_norm, step=keep_frozen(1, 3)),
    "whole model in eval mode": Case(build=with_norm, evaluating=True),
    "owners change their mode": Case(build=with_norm, step=modes_change),
    "validation after each step": Case(build=with_norm, step=validates),
    "rank 0 validates alone": Case(build=with_norm, step=rank0_validates, skip=("ddp",)),
    "queue of keys": Case(build=Queue, step=labels_step),
    "codebook": Case(build=Codebook),
    "one buffer, two names": Case(build=Named),
}
