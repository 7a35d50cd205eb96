"""Activation checkpointing in its forms: gradients and recomputation inside a backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.parity.harness import Case, Trainer, batch, loss_of, pause


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Adapted(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Segments(nn.Module):
    def __init__(self, block: Any, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not x.requires_grad:  # what enable_input_require_grads() does for frozen embeddings
            x.requires_grad_()
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, **self.options)
            if number == 1:
                x = pause(
                    x, *(partial(getattr, m, "weight") for m in self.modules() if _trained(m))
                )
        return self.head(x)


def _trained(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.weight.requires_grad


def adapters(**options: Any) -> nn.Module:
    model = Segments(Adapted, **options)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, policy)


class Sequential(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x
        return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=self.reentrant))


class Nested(nn.Module):
    """A checkpointed segment inside a checkpointed segment."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.inner, self.outer = Block(), Block()
        self.reentrant = reentrant

    def _segment(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self._segment, self.embed(x), use_reentrant=self.reentrant))


class Reverse(torch.autograd.Function):
    """A reversible block: backward computes the input anew and back-propagates inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        left, right = x.chunk(2, dim=1)
        out = torch.cat([left, right + block(left)], dim=1)
        ctx.save_for_backward(out.detach())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        left = out.chunk(2, dim=1)[0].detach().requires_grad_()
        first, second = gradient.chunk(2, dim=1)
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(left), second)
        return torch.cat([first + left.grad, second], dim=1), None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = Reverse.apply(x, block).flip(1)
        return self.head(x)


def accumulating(trainer: Trainer, step: int) -> Tensor:
    for part in range(3):
        x, y = batch(10 * step + part)
        with trainer.accumulate(part < 2):
            loss = loss_of(trainer.model(x), y) / 3
            loss.backward()
    trainer.end()
    return loss


CASES: dict[str, Case] = {}
for reentrant, word in ((True, "re-entrant"), (False, "not re-entrant")):
    CASES |= {
        f"segments, {word}": Case(build=partial(Segments, Block, use_reentrant=reentrant)),
        f"adapters, {word}": Case(build=partial(adapters, use_reentrant=reentrant)),
        f"dropout, {word}": Case(
            build=partial(Segments, partial(Block, 0.3), use_reentrant=reentrant)
        ),
        f"nested, {word}": Case(build=partial(Nested, reentrant)),
        f"sequential, {word}": Case(build=partial(Sequential, reentrant)),
    }
CASES |= {
    "selective": Case(build=partial(Segments, Block, use_reentrant=False, context_fn=SELECTIVE)),
    "reversible": Case(build=Reversible),
    "segments, not re-entrant, accumulating": Case(
        build=partial(Segments, Block, use_reentrant=False), step=accumulating
    ),
    "adapters, re-entrant, accumulating": Case(
        build=partial(adapters, use_reentrant=True), step=accumulating
    ),
}
CASES |= {
    f"{name}, eval mode": replace(case, evaluating=True)
    for name, case in CASES.items()
    if name.startswith(("segments, ", "adapters, ")) and "accumulating" not in name
}
