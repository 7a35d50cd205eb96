"""Weights that back-propagation reads after their own gradient is complete.

Plain PyTorch updates nothing before backward is over, so there such a read is right whatever way
it takes. An engine that updates early must know of it, wait, or refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.parity.harness import Case, Trainer, batch, loss_of, pause, sgd


class Aliased(nn.Module):
    """Reads ``late.weight`` through an alias that was made before, of which autograd knows not."""

    def __init__(self, alias: Callable[[Aliased, Tensor], None]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.late = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 4)
        alias(self, self.late.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) @ self.alias
        x = pause(torch.tanh(x), lambda: self.alias)  # not the weight: that would be noticed
        return self.head(torch.tanh(self.late(x)))


ALIASES: dict[str, Callable[[Aliased, Tensor], None]] = {
    "buffer": lambda m, w: m.register_buffer("alias", w.data, persistent=False),
    "frozen parameter": lambda m, w: setattr(m, "alias", nn.Parameter(w.data, False)),
    "attribute": lambda m, w: setattr(m, "alias", w.data.t()),
    "numpy": lambda m, w: setattr(m, "alias", torch.from_numpy(w.detach().numpy())),
}


class Late(nn.Module):
    """``read`` uses ``late.weight`` in front of the layer that trains it."""

    def __init__(self, read: Callable[[Late, Tensor], Tensor], begins: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.late = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 4)
        self.read = read
        self.calls, self.begins = 0, begins

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.calls >= self.begins:
            x = self.read(self, x)
        self.calls += 1
        x = pause(x, lambda: self.late.weight)
        return self.head(torch.tanh(self.late(x)))


def detach(model: Late, x: Tensor) -> Tensor:
    return torch.tanh(x @ model.late.weight.detach().t())


def data(model: Late, x: Tensor) -> Tensor:
    return torch.tanh(x @ model.late.weight.data.t())


def no_grad(model: Late, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = model.late.weight.t()
    return torch.tanh(x @ weight)


def recomputed(read: Callable[[Late, Tensor], Tensor], reentrant: bool) -> Any:
    def segment(model: Late, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(partial(read, model), x, use_reentrant=reentrant)
        return out

    return segment


def recomputed_norm(model: Late, x: Tensor) -> Tensor:
    """The read makes no tensor that autograd saves: only the recomputation is wrong."""

    def segment(x: Tensor) -> Tensor:
        return torch.tanh(x * float(model.late.weight.detach().norm()))

    out: Tensor = checkpoint(segment, x, use_reentrant=False)
    return out


class KeepsData(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        # Not the module's weight as an argument: then its gradient would wait for this node.
        ctx.weight = module.weight.data
        return x @ ctx.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, None


class KeepsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        ctx.module = module
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.module.weight, None


def function_with_data(model: Late, x: Tensor) -> Tensor:
    return torch.tanh(KeepsData.apply(x, model.late))


def function_with_module(model: Late, x: Tensor) -> Tensor:
    return torch.tanh(KeepsModule.apply(x, model.late))


def tensor_hook(model: Late, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    x.register_hook(lambda g: g * model.late.weight.detach().norm())
    return x


def through_own_hooks(model: Late, x: Tensor) -> Tensor:
    """As ``save_on_cpu`` does, which on a CPU packs the tensor itself."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return detach(model, x)


def through_numpy(model: Late, x: Tensor) -> Tensor:
    return torch.tanh(x @ torch.from_numpy(model.late.weight.detach().numpy()).t())


class FullHook(nn.Module):
    """A module's backward hook scales by the module's own weight, after its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 4)
        self.early = nn.Tanh()
        self.early.register_full_backward_hook(
            lambda m, gi, go: (gi[0] * self.late.weight.detach().norm(),)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = pause(self.early(self.first(x)), lambda: self.late.weight)
        return self.head(torch.tanh(self.late(x)))


def flat(read: Callable[[Late, Tensor], Tensor]) -> nn.Module:
    """All parameters are views of one piece of memory, as flattening libraries leave them."""
    model = Late(read)
    parameters = list(model.parameters())
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(parameters).detach(), parameters
    )
    return model


class Gain(nn.Module):
    """Called through its parts: the read is in a part that another part's weight comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(16, 16), Late(lambda model, x: x)


def parts_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    model = trainer.inner
    assert isinstance(model, Gain)
    x = torch.tanh(model.first(x))
    x = torch.tanh(x @ model.body.late.weight.detach().t())
    loss = loss_of(model.body(x), y)
    loss.backward()
    trainer.end()
    return loss


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, fused=True)


READS: dict[str, Callable[[Late, Tensor], Tensor]] = {
    "detach": detach,
    "data": data,
    "no_grad": no_grad,
    "detach in recompute": recomputed(detach, reentrant=False),
    "data in recompute": recomputed(data, reentrant=False),
    "detach in re-entrant recompute": recomputed(detach, reentrant=True),
    "norm in recompute": recomputed_norm,
    "function keeps data": function_with_data,
    "function keeps module": function_with_module,
    "tensor hook": tensor_hook,
    "own saved tensor hooks": through_own_hooks,
    "numpy": through_numpy,
}

CASES: dict[str, Case] = {
    name: Case(build=partial(Late, read), optimizer=fused) for name, read in READS.items()
}
CASES |= {
    "detach, default kernels": Case(build=partial(Late, detach)),
    "detach in recompute, default kernels": Case(build=partial(Late, READS["detach in recompute"])),
    "full backward hook": Case(build=FullHook, optimizer=fused),
    "flat storage": Case(build=partial(flat, detach), optimizer=fused),
    "outside the root's forward": Case(build=Gain, optimizer=fused, step=parts_step, by_hand=True),
}
CASES |= {
    f"aliased as {name}": Case(build=partial(Aliased, alias)) for name, alias in ALIASES.items()
}
CASES["two parameters, one memory"] = Case(
    build=partial(Aliased, lambda m, w: setattr(m, "alias", nn.Parameter(w.data))),
    refused=dict.fromkeys(
        ("layerwise", "deferred", "ddp"), "alias.*late.weight|late.weight.*alias"
    ),
)
CASES |= {
    f"{name} from step 4 on": Case(
        build=partial(Late, READS[name], begins=3), optimizer=fused, steps=6
    )
    for name in ("detach", "data", "detach in recompute", "function keeps data")
}
CASES |= {
    f"{name}, eval mode": replace(CASES[name], evaluating=True)
    for name in (
        "detach",
        "data",
        "detach, default kernels",
        "detach in recompute",
        "detach in re-entrant recompute",
        "function keeps data",
        "flat storage",
        "detach from step 4 on",
    )
}
