"""Optimizers, their options and kernels, and what people do to their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.harness import Case, Trainer, batch, loss_of


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16, bias),
        nn.Tanh(),
        nn.Linear(16, 16, bias),
        nn.Tanh(),
        nn.Linear(16, 4, bias),
    )


def matrices() -> nn.Module:
    return mlp(bias=False)


def make(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        # Copies: a rate in a tensor may be changed in place.
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **own)
        return optimizer

    return build


def grouped(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Weights decay, biases do not, the head has a rate of its own."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        head = [p for n, p in named if n.startswith("4.")]
        weights = [p for n, p in named if n.endswith("weight") and not n.startswith("4.")]
        biases = [p for n, p in named if n.endswith("bias") and not n.startswith("4.")]
        groups = [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0},
            {"params": head, "lr": 0.03},
        ]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **options)
        return optimizer

    return build


class Lion(torch.optim.Optimizer):
    """An optimizer nobody has heard of: stepped whole, after backward."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients, so no parameter may be updated before the last."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": make("SGD", lr=0.1),
    "SGD momentum": make("SGD", lr=0.1, momentum=0.9, weight_decay=1e-2, dampening=0.1),
    "SGD nesterov": make("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "SGD nesterov, decay": make("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD nesterov, foreach": make("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD nesterov, fused": make("SGD", lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD nesterov, plain": make("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD maximize": make("SGD", lr=0.1, momentum=0.9, maximize=True),
    "SGD maximize, foreach": make("SGD", lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "Adam": make("Adam", lr=1e-2),
    "Adam, amsgrad and decay": make("Adam", lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam, foreach": make("Adam", lr=1e-2, foreach=True),
    "Adam, fused": make("Adam", lr=1e-2, fused=True),
    "Adam, maximize": make("Adam", lr=1e-2, maximize=True),
    "AdamW": make("AdamW", lr=1e-2),
    "AdamW, fused": make("AdamW", lr=1e-2, fused=True),
    "AdamW, tensor rate": make("AdamW", lr=torch.tensor(1e-2)),
    "AdamW, tensor rate, fused": make("AdamW", lr=torch.tensor(1e-2), fused=True),
    "Adam, tensor rate": make("Adam", lr=torch.tensor(1e-2)),
    "SGD, tensor rate": make("SGD", lr=torch.tensor(0.1), momentum=0.9),
    "Adamax": make("Adamax", lr=1e-2),
    "NAdam": make("NAdam", lr=1e-2, momentum_decay=0.01),
    "RAdam": make("RAdam", lr=1e-2),
    "RAdam, foreach": make("RAdam", lr=1e-2, foreach=True),
    "Adagrad": make("Adagrad", lr=1e-2),
    "Adagrad, fused": make("Adagrad", lr=1e-2, fused=True),
    "Adadelta": make("Adadelta", lr=1.0),
    "RMSprop": make("RMSprop", lr=1e-2, centered=True, momentum=0.9),
    "RMSprop, foreach": make("RMSprop", lr=1e-2, foreach=True),
    "Rprop": make("Rprop", lr=1e-2),
    "ASGD": make("ASGD", lr=1e-2, lambd=1e-2, t0=2),
    "Adafactor": make("Adafactor", lr=1e-2),
    "Adafactor, foreach": make("Adafactor", lr=1e-2, foreach=True),
    "groups, SGD": grouped("SGD", lr=0.1, momentum=0.9),
    "groups, AdamW": grouped("AdamW", lr=1e-2),
    "Lion": lambda model: Lion(model.parameters()),
    "Normed": lambda model: Normed(model.parameters(), lr=0.1),
}
CASES: dict[str, Case] = {
    name: Case(build=mlp, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()
}
CASES["Muon"] = Case(build=matrices, optimizer=make("Muon", lr=1e-2))


# -- options that change -------------------------------------------------------------------------


def changes(trainer: Trainer, step: int) -> Tensor:
    """Each group has its own schedule, set by hand before each forward."""
    for number, group in enumerate(trainer.optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step + number)
        group["weight_decay"] = 0.01 * step * number
        if "momentum" in group:
            group["momentum"] = 0.5 + 0.1 * step
        if "betas" in group:
            group["betas"] = (0.8 + 0.02 * step, 0.99)
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


def after_forward(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)
    loss.backward()
    trainer.end()
    return loss


def between(change: Callable[[Trainer, int], None]) -> Callable[[Trainer, int], Tensor]:
    """``change`` comes between backward() and the step, after whatever backward began."""

    def step(trainer: Trainer, number: int) -> Tensor:
        x, y = batch(number)
        loss = loss_of(trainer.model(x), y)
        loss.backward()
        trainer.settle()
        change(trainer, number)
        trainer.end()
        return loss

    return step


def set_rate(trainer: Trainer, step: int) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.3 / (1 + step)


def set_tensor_rate(trainer: Trainer, step: int) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"].fill_(0.3 / (1 + step))


def set_decay(trainer: Trainer, step: int) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.1 * (1 + step)


def gradients(change: Callable[[Tensor], None]) -> Callable[[Trainer, int], None]:
    def act(trainer: Trainer, step: int) -> None:
        if step < 1:
            return
        for parameter in trainer.inner.parameters():
            assert parameter.grad is not None
            change(parameter.grad)

    return act


def halve_data(gradient: Tensor) -> None:
    gradient.data.mul_(0.5)


def halve_detached(gradient: Tensor) -> None:
    gradient.detach().mul_(0.5)


def halve_numpy(gradient: Tensor) -> None:
    array = gradient.numpy()
    array *= 0.5


def replace_one(trainer: Trainer, step: int) -> None:
    parameter = next(iter(trainer.inner.parameters()))
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def drop_one(trainer: Trainer, step: int) -> None:
    """What DINO does to its last layer in the first epoch."""
    if step < 2:
        list(trainer.inner.parameters())[-1].grad = None


def replace_data(trainer: Trainer, step: int) -> None:
    parameter = next(iter(trainer.inner.parameters()))
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data * 0.5


TOO_LATE = {"layerwise": "clip_grad_norm|deferred", "ddp": "clip_grad_norm|deferred"}
EARLY = ("layerwise", "ddp")
CASES |= {
    "options set before forward, SGD": Case(
        build=mlp, optimizer=grouped("SGD", lr=0.1, momentum=0.9), step=changes
    ),
    "options set before forward, AdamW": Case(
        build=mlp, optimizer=grouped("AdamW", lr=1e-2), step=changes
    ),
    "rate set after forward": Case(build=mlp, optimizer=OPTIMIZERS["SGD"], step=after_forward),
    "rate set after backward": Case(
        build=mlp, optimizer=OPTIMIZERS["SGD"], step=between(set_rate), may_refuse=EARLY
    ),
    "tensor rate filled after backward": Case(
        build=mlp,
        optimizer=OPTIMIZERS["SGD, tensor rate"],
        step=between(set_tensor_rate),
        may_refuse=EARLY,
    ),
    "decay set after backward": Case(
        build=mlp, optimizer=grouped("AdamW", lr=1e-2), step=between(set_decay), may_refuse=EARLY
    ),
    "rate set after backward, Lion": Case(
        build=mlp, optimizer=OPTIMIZERS["Lion"], step=between(set_rate)
    ),
}
CASES |= {
    f"gradient changed {name}": Case(
        build=mlp, optimizer=OPTIMIZERS["SGD momentum"], step=between(change), refused=TOO_LATE
    )
    for name, change in {
        "through .data": gradients(halve_data),
        "through detach()": gradients(halve_detached),
        "through numpy": gradients(halve_numpy),
        "by another tensor": replace_one,
        "to None": drop_one,
        "by other .data": replace_data,
    }.items()
}
