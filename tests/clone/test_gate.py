"""What a clone's first forward pass reads has arrived, however the model comes to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapwood.clone.gate import Gate
from sapwood.state.tensors import named_buffers, named_parameters


class Late:
    """An arrival whose tensors are complete only when somebody waits for them."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor]) -> None:
        self.tensors = {**named_parameters(model), **named_buffers(model)}
        self.memory = {("model", name): tensor for name, tensor in self.tensors.items()}
        self.values = values
        self.waited: list[str] = []

    def wait(self, keys: list[tuple[str, str]], timeout: float) -> None:
        for _, name in keys:
            self.waited.append(name)
            with torch.no_grad():
                self.tensors[name].copy_(self.values[name])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.part.weight, self.part.bias)


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Functional()

    def forward(self, x: Tensor) -> Tensor:
        return self.part.forward(x)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([*self.many, self.named["a"]])


class SecondNameFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4, bias=False)
        self.first.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Alias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.half = self.part.weight.detach()[:2]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.half)


class Attention(nn.Module):
    """Whose output projection is a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x)[0]
        return found


def gated(build: Callable[[], nn.Module]) -> tuple[nn.Module, Late, list[str], Any]:
    model, there = build(), build()
    values = {**named_parameters(there), **named_buffers(there)}
    late = Late(model, values)
    ended: list[str] = []
    gate = Gate(model, late, lambda: ended.append("finished"), 1.0)  # type: ignore[arg-type]
    return model, late, ended, (gate, there)


@pytest.mark.parametrize(
    "build", [Functional, Method, Lists, SecondNameFirst, Attention], ids=lambda b: b.__name__
)
def test_every_way_to_read_a_weight_waits_for_it(build: Callable[[], nn.Module]) -> None:
    model, late, ended, (gate, there) = gated(build)
    x = torch.randn(4, 4)
    assert torch.equal(model(x), there(x))
    assert set(late.waited) == set(late.tensors)
    assert ended == ["finished"]
    gate.remove()
    late.waited.clear()
    model(x)
    assert not late.waited


def test_an_alias_that_no_module_registered_waits_for_its_weight() -> None:
    model, late, _, _ = gated(Alias)
    assert torch.equal(model(torch.eye(4)), late.values["part.weight"][:2].T)


def test_a_part_that_is_called_alone_waits_and_others_do_not() -> None:
    model, late, ended, (_, there) = gated(lambda: nn.Sequential(Functional(), nn.Linear(4, 4)))
    x = torch.randn(4, 4)
    assert torch.equal(model[0](x), there[0](x))  # type: ignore[index]
    assert {name.partition(".")[0] for name in late.waited} == {"0"}
    assert not ended


def test_looking_at_shapes_waits_for_nothing() -> None:
    def look(module: nn.Module, args: Any) -> None:
        assert [p.stride() for p in module.parameters()]

    model, late, _, _ = gated(lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity()))
    seen: list[list[str]] = []
    model.register_forward_pre_hook(look)
    model.register_forward_pre_hook(lambda *_: seen.append(list(late.waited)))
    model(torch.randn(1, 4))
    assert seen == [[]]
    assert late.waited


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Odd(Functional):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no batch")

    model, late, ended, _ = gated(Odd)
    with pytest.raises(ValueError, match="no batch"):
        model(torch.randn(1, 4))
    _ = late.tensors["part.weight"] + 1
    assert not late.waited
    assert not ended
