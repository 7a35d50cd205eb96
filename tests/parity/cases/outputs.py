"""What a forward may do inside and return, besides one tensor."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.harness import Case, Trainer, batch, loss_of


@dataclass
class Plain:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Slots:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    inner: Slots | None = None


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Reads as a mapping, a tuple and an object with fields, as Hugging Face's does."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]


Pair = namedtuple("Pair", ["logits", "hidden"])


class Opaque:
    """No class anybody knows."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        return self._logits


class Body(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.wrap(self.head(torch.tanh(self.second(hidden))), hidden)


def output_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    output = trainer.model(x)
    while not isinstance(output, Tensor):
        output = output["logits"] if type(output) is dict else output.logits
    loss = loss_of(output, y)
    loss.backward()
    trainer.end()
    return loss


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": lambda out, hidden: Plain(out, [hidden]),
    "dataclass with slots": lambda out, hidden: Slots(out, [hidden]),
    "nested": lambda out, hidden: {"logits": Frozen(out, Slots(hidden))},
    "ModelOutput": lambda out, hidden: ModelOutput(logits=out, hidden=(hidden, {"deep": [out]})),
    "namedtuple": lambda out, hidden: Pair(out, hidden),
    "an object of its own": lambda out, hidden: Opaque(out),
}


class SparseForward(nn.Module):
    """A graph network: the neighbours are a sparse matrix."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        dense = (torch.rand(8, 8) > 0.6).float()
        self.edges = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(self.edges, torch.tanh(self.first(x))))


class SparseWeight(SparseForward):
    """The values of the sparse matrix are made in forward, so autograd saves sparse tensors."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weighted = torch.sparse_coo_tensor(
            self.edges.coalesce().indices(), x[:, 0][self.edges.coalesce().indices()[0]], (8, 8)
        )
        return self.head(torch.sparse.mm(weighted, x))


class Inner(nn.Module):
    """Forward differentiates part of the model by ``torch.func``, as force fields do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))

        def energy(z: Tensor) -> Tensor:
            return torch.tanh(self.energy(z)).square().sum()

        if self.way == "grad":
            force = torch.func.grad(energy)(x)
        elif self.way == "vjp":
            _, pull = torch.func.vjp(energy, x)
            (force,) = pull(torch.ones(()))
        elif self.way == "jacrev":
            force = torch.func.jacrev(energy)(x)
        elif self.way == "jvp":
            force = sum(torch.func.jvp(self.energy, (x,), (torch.ones_like(x),)))
        elif self.way == "vmap":
            force = torch.func.vmap(torch.func.grad(energy))(x)
        elif self.way == "functional_call":
            force = torch.func.functional_call(
                self.energy, {"weight": self.energy.weight * 2, "bias": self.energy.bias}, (x,)
            )
        else:
            (force,) = torch.autograd.grad(energy(x), x, create_graph=True)
        return self.head(x - 0.1 * force)


def functional_step(trainer: Trainer, step: int) -> Tensor:
    """The whole model is called with a dictionary of its own parameters."""
    x, y = batch(step)
    names = dict(trainer.inner.named_parameters())
    model = trainer.inner if not trainer.ours else trainer.model
    loss = loss_of(torch.func.functional_call(model, names, (x,)), y)
    loss.backward()
    trainer.end()
    return loss


class Aside(nn.Module):
    """Keeps a hidden value that the loss uses."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.returns = returns
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        self.kept = self.head(hidden)
        return {"nothing": None, "hidden": hidden, "detached": hidden.detach()}[self.returns]


def aside_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    model = trainer.inner
    assert isinstance(model, Aside)
    trainer.model(x)
    assert model.kept is not None
    loss = loss_of(model.kept, y)
    loss.backward()
    trainer.end()
    return loss


def hooked(trainer: Trainer) -> None:
    """A forward hook collects what the loss is made of: feature losses, distillation."""

    def collect(module: nn.Module, args: Any, output: Tensor) -> None:
        trainer.kept["feature"] = output

    trainer.inner.get_submodule("0").register_forward_hook(collect)


def hooked_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y) + trainer.kept["feature"].square().mean()
    loss.backward()
    trainer.end()
    return loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


class Triple(nn.Module):
    """Called with keyword arguments, tuples and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, *, labels: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.first(x)))
        return F.cross_entropy(logits, labels["y"]), logits


def keyword_step(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    loss, _ = trainer.model(x, labels={"y": y})
    loss.backward()
    trainer.end()
    return loss


CASES: dict[str, Case] = {
    f"returns {name}": Case(build=partial(Body, wrap), step=output_step)
    for name, wrap in OUTPUTS.items()
}
CASES |= {
    f"torch.func: {way}": Case(build=partial(Inner, way))
    for way in ("grad", "vjp", "jacrev", "jvp", "vmap", "functional_call")
}
CASES |= {
    "autograd.grad in forward": Case(build=partial(Inner, "autograd")),
    "functional_call of the whole": Case(build=mlp, step=functional_step, by_hand=True),
    "sparse matrix in forward": Case(build=partial(SparseForward, "coo")),
    "sparse CSR matrix in forward": Case(build=partial(SparseForward, "csr")),
    "sparse matrix made in forward": Case(build=partial(SparseWeight, "coo")),
    "loss from a hook": Case(build=mlp, prepare=hooked, step=hooked_step),
    "keyword arguments": Case(build=Triple, step=keyword_step),
}
CASES |= {
    f"loss kept on the module, returns {what}": Case(build=partial(Aside, what), step=aside_step)
    for what in ("nothing", "hidden", "detached")
}
