"""Relatives of what went wrong once: reads, replacements and calls at places nobody thought of."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sapwood.testing.ranks import rank
from tests.parity.cases.late import Late, detach, fused
from tests.parity.cases.loops import around_both, mlp, simple
from tests.parity.harness import Case, Trainer, batch, loss_of, pause


class Router(nn.Module):
    """A checkpointed expert layer: the choice is recomputed, the gate trained by another loss."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.reentrant = reentrant
        self.balance: Tensor | None = None

    def _layer(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), 3).to(x.dtype)
        out = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (out * chosen[:, :, None]).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        out = checkpoint(self._layer, hidden, use_reentrant=self.reentrant)
        out = pause(out, lambda: self.gate.weight)
        # Through the input of the gate only, so that the gate's gradient is there early.
        self.balance = 10 * self.gate(hidden.detach()).square().mean()
        return self.head(torch.tanh(out))


def balanced(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    output = trainer.model(x)
    assert isinstance(trainer.inner, Router)
    assert trainer.inner.balance is not None
    loss = loss_of(output, y) + trainer.inner.balance
    loss.backward()
    trainer.end()
    return loss


def whole_recomputed(reentrant: bool) -> Any:
    """Checkpointing around the call of the model itself."""

    def step(trainer: Trainer, number: int) -> Tensor:
        x, y = batch(number)
        x.requires_grad_()
        loss = loss_of(checkpoint(trainer.model, x, use_reentrant=reentrant), y)
        loss.backward()
        trainer.end()
        return loss

    return step


def new_head(trainer: Trainer, step: int) -> Tensor:
    """The head is replaced, in the model and in the optimizer's list."""
    if step == 2:
        place, old = trainer.inner, trainer.inner.get_submodule("4")
        with torch.random.fork_rng():
            torch.manual_seed(5)
            new = nn.Linear(16, 4)
        params = trainer.optimizer.param_groups[0]["params"]
        for before, after in zip(old.parameters(), new.parameters(), strict=True):
            position = next(i for i, p in enumerate(params) if p is before)
            params[position] = after
            trainer.optimizer.state.pop(before, None)
        place[4] = new
    return simple(trainer, *batch(step))


def loses_parameters(trainer: Trainer, step: int) -> Tensor:
    """A group is taken away from the optimizer and given back two steps later."""
    groups = trainer.optimizer.param_groups
    trainer.inner.zero_grad()  # also of those the optimizer does not hold just now
    if step == 1:
        trainer.kept["first"] = groups[0]["params"][:2]
        del groups[0]["params"][:2]
    if step == 3:
        groups[0]["params"][:0] = trainer.kept["first"]
    return simple(trainer, *batch(step))


class Grows(nn.Module):
    """A cache in a buffer that is replaced by a longer one; and a running value beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.arange(len(self.cache) + 1.0)
        x = torch.tanh(self.first(x))
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.head(x - self.mean) + self.cache.sum()


class NewBuffer(nn.Module):
    """A buffer that exists from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mean", None)
        self.register_buffer("other", torch.ones(1))  # with no buffer at all DDP sends none later

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.other
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else torch.lerp(self.mean, now, 0.5)
        return self.head(x - self.mean)


class Inside(nn.Module):
    """The root's own flag says eval, its children train: a wrapper nobody calls train() on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def flag_of_root(trainer: Trainer, step: int) -> Tensor:
    trainer.inner.training = False
    return simple(trainer, *batch(step))


def anomaly(trainer: Trainer, step: int) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=True):
        return simple(trainer, *batch(step))


def offloaded(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


def reloads(trainer: Trainer, step: int) -> Tensor:
    """State is set back to that of two steps ago, weights and optimizer."""
    if step == 1:
        trainer.kept["weights"] = copy.deepcopy(trainer.inner.state_dict())
        trainer.kept["state"] = copy.deepcopy(trainer.optimizer.state_dict())
    if step == 3:
        trainer.inner.load_state_dict(trainer.kept["weights"])
        trainer.optimizer.load_state_dict(trainer.kept["state"])
    if step == 4:
        trainer.optimizer.state.clear()
    return simple(trainer, *batch(step))


def last_missing(trainer: Trainer, step: int) -> Tensor:
    """Accumulates; in some steps a rank has no last backward."""
    x, y = batch(step)
    with trainer.accumulate():
        loss = loss_of(trainer.model(x), y)
        loss.backward()
    if (step + rank()) % 2:
        x, y = batch(step + 50)
        loss = loss_of(trainer.model(x), y)
        loss.backward()
    trainer.end()
    return loss


def penalty(trainer: Trainer, step: int) -> Tensor:
    """WGAN-GP: the norm of the gradient of the input is part of the loss."""
    x, y = batch(step)
    x.requires_grad_()
    output = trainer.model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = loss_of(output, y) + (gradient.norm(dim=1) - 1).square().mean()
    loss.backward()
    trainer.end()
    return loss


def inner_loop(trainer: Trainer, step: int) -> Tensor:
    """MAML: one inner step with a graph, the outer loss through it."""
    x, y = batch(step)
    model = trainer.inner
    named = dict(model.named_parameters())
    first = loss_of(torch.func.functional_call(model, named, (x,)), y)
    gradients = torch.autograd.grad(first, list(named.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(named.items(), gradients, strict=True)}
    loss = loss_of(torch.func.functional_call(model, fast, (x * 0.5,)), y)
    loss.backward()
    trainer.end()
    return loss


def grad_cam(trainer: Trainer) -> None:
    """Hooks that look at gradients and return nothing."""
    for module in trainer.inner.modules():
        module.register_full_backward_pre_hook(lambda m, g: None)
        module.register_full_backward_hook(lambda m, gi, go: None)


def extrapolates(trainer: Trainer, step: int) -> Tensor:
    """The first forward of a step is made with other weights, which are put back after it."""
    x, y = batch(step)
    kept = [p.detach().clone() for p in trainer.inner.parameters()]
    with torch.no_grad():
        for parameter in trainer.inner.parameters():
            parameter.add_(0.01)
        trainer.extra.append(trainer.model(x))
        for parameter, old in zip(trainer.inner.parameters(), kept, strict=True):
            parameter.copy_(old)
    return simple(trainer, x, y)


def sharpness_aware(trainer: Trainer, step: int) -> Tensor:
    """SAM: gradients at one point, weights moved, gradients there, weights put back, step."""
    x, y = batch(step)
    with trainer.accumulate():
        loss_of(trainer.model(x), y).backward()
    parameters = list(trainer.inner.parameters())
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, [p.grad * 0.05 for p in parameters])
    for parameter in parameters:
        parameter.grad = None
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.settle()
    with torch.no_grad():
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
    trainer.end()
    return loss


CASES: dict[str, Case] = {
    "choice in recompute": Case(
        build=lambda: Router(False), step=balanced, optimizer=fused, steps=6
    ),
    "choice in re-entrant recompute": Case(
        build=lambda: Router(True), step=balanced, optimizer=fused, steps=6
    ),
    "whole model recomputed": Case(build=mlp, step=whole_recomputed(False), by_hand=True),
    "whole model recomputed, re-entrant": Case(
        build=mlp, step=whole_recomputed(True), by_hand=True
    ),
    "late read, accumulating": Case(build=lambda: Late(detach), optimizer=fused, step=around_both),
    "late read, whole model recomputed": Case(
        build=lambda: Late(detach), optimizer=fused, step=whole_recomputed(False), by_hand=True
    ),
    "late read, saved on the CPU": Case(
        build=lambda: Late(detach), optimizer=fused, step=offloaded
    ),
    "late read, root's flag is eval": Case(
        build=lambda: Inside(Late(detach)), optimizer=fused, step=flag_of_root
    ),
    "head replaced": Case(
        build=mlp, step=new_head, by_hand=True, steps=5, may_refuse=("layerwise", "deferred")
    ),
    "head replaced, eval mode": Case(
        build=mlp,
        step=new_head,
        by_hand=True,
        steps=5,
        evaluating=True,
        may_refuse=("layerwise", "deferred"),
    ),
    "taken from the optimizer for a while": Case(
        build=mlp, step=loses_parameters, by_hand=True, steps=5
    ),
    "buffer that grows": Case(build=Grows, steps=5),
    "buffer made in forward": Case(build=NewBuffer, steps=5),
    "anomaly detection": Case(build=mlp, step=anomaly),
    "state set back": Case(build=mlp, step=reloads, steps=6),
    "last backward missing": Case(build=mlp, step=last_missing, by_hand=True, steps=6),
    "gradient penalty": Case(build=mlp, step=penalty),
    "inner loop": Case(build=mlp, step=inner_loop, by_hand=True),
    "hooks that look": Case(build=mlp, prepare=grad_cam),
    "hooks that look, made later": Case(build=mlp, attach=grad_cam),
    "weights moved for a forward": Case(build=mlp, step=extrapolates, by_hand=True),
    "sharpness-aware": Case(
        build=mlp, step=sharpness_aware, by_hand=True, may_refuse=("layerwise",)
    ),
}
