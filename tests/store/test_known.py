"""A second save does not walk a module again, and never takes it for what it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sapwood.store
from sapwood.store.known import KnownStates
from sapwood.store.tree import take_apart


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.empty = nn.Parameter(torch.empty(0))


def same(found: Any, expected: Any) -> None:
    assert found.names == expected.names
    assert (found.structure, found.text) == (expected.structure, expected.text)
    for mine, other in zip(found.tensors, expected.tensors, strict=True):
        assert (mine.dtype, mine.shape, mine.requires_grad) == (other.dtype, other.shape, False)
        assert mine.data_ptr() == other.data_ptr()
        assert torch.equal(mine, other)


def tie(net: Net) -> None:
    net.blocks[1].weight = net.blocks[0].weight


def alias(net: Net) -> None:
    net.blocks[1].weight.data = net.blocks[0].weight.data


def override(net: Net) -> None:
    only = {"only": torch.ones(1)}
    net.state_dict = lambda **_: only  # type: ignore[assignment,method-assign]


def hook(net: Net) -> None:
    def without_bias(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        del state[prefix + "bias"]

    net.first.register_state_dict_post_hook(without_bias)


def persist(net: Net) -> None:
    net._non_persistent_buffers_set.discard("scratch")


CHANGES: list[Callable[[Net], Any]] = [
    tie,
    alias,
    override,
    hook,
    persist,
    lambda net: net.first.weight.requires_grad_(False),
    lambda net: setattr(net, "first", nn.Linear(4, 3)),
    lambda net: setattr(net, "first", nn.Linear(2, 3)),
    lambda net: setattr(net.first, "bias", None),
    lambda net: setattr(net, "scale", nn.Parameter(torch.zeros(()))),
    lambda net: setattr(net.first.weight, "data", torch.zeros(7, 2)),
    lambda net: setattr(net.first.weight, "data", torch.zeros(3, 4)),
    lambda net: setattr(net.first.weight, "data", torch.zeros(4, 3).t()),
    lambda net: net.register_buffer("late", torch.ones(2)),
    lambda net: delattr(net, "table"),
    lambda net: net.blocks.append(nn.Linear(3, 3)),
    lambda net: net.double(),
    lambda net: net.norm.train(False),
    lambda net: setattr(net.norm, "_version", 7),
    lambda net: net.norm(torch.randn(4, 3)),  # in place: running statistics, the count
    lambda net: setattr(net, "table", torch.arange(6)),
    lambda net: nn.utils.parametrizations.weight_norm(net.first),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_seen(change: Callable[[Net], Any]) -> None:
    net, known = Net(), KnownStates()
    for _ in range(2):
        same(known.take_apart(net), take_apart(net))
    assert known.hits == 1
    change(net)
    for _ in range(2):
        same(known.take_apart(net), take_apart(net))


def test_values_are_those_of_now() -> None:
    net = Net()
    with sapwood.store.open("memory:") as repo:
        for step in range(3):
            with torch.no_grad():
                net.scale.fill_(step)
                net.first.weight.data = torch.full((3, 4), float(step))
            repo.save(net, f"net@{step}")
        assert repo._states.hits == 2
        for step in range(3):
            loaded = repo.load(f"net@{step}")
            assert loaded["scale"] == step
            assert (loaded["first.weight"] == step).all()


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Own(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"mine": self.weight.detach() * 2}


@pytest.mark.parametrize("kind", [Extra, Own])
def test_modules_with_a_state_of_their_own_are_walked_each_time(kind: type[nn.Linear]) -> None:
    net, known = nn.Sequential(kind(2, 2), nn.Linear(2, 2)), KnownStates()
    for calls in range(3):
        net[0].calls = calls  # type: ignore[assignment]
        expected, found = take_apart(net), known.take_apart(net)
        assert (found.names, found.structure) == (expected.names, expected.structure)
    assert known.hits == 0


def test_views_of_one_memory_are_walked_each_time() -> None:
    net, known = nn.Module(), KnownStates()
    whole = torch.arange(6.0)
    net.register_buffer("head", whole[:4])
    net.register_buffer("whole", whole)
    for _ in range(2):
        same(known.take_apart(net), take_apart(net))
    assert known.hits == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when imported
def test_wrappers_lead_to_the_same_model() -> None:
    net, known = Net(), KnownStates()
    compiled = torch.compile(net)
    for _ in range(2):
        same(known.take_apart(compiled), take_apart(net))  # type: ignore[arg-type]
    same(known.take_apart(net), take_apart(net))
    assert known.hits == 2


def test_a_model_that_is_gone_is_forgotten() -> None:
    known = KnownStates()
    for _ in range(20):
        known.take_apart(Net())
        gc.collect()
    assert len(known._known) == 0
    nets = [Net() for _ in range(20)]
    for net in nets:
        known.take_apart(net)
    assert len(known._known) < 20
    for net in nets:
        same(known.take_apart(net), take_apart(net))
