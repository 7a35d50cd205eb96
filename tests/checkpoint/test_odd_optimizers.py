"""Optimizer state as users and their optimizers make it: loaded anew, reset, under any key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.state.apply import GivenState, apply_optimizer
from sapwood.state.catalog import Catalog, Entry
from tests.checkpoint.stateful import same_value
from tests.checkpoint.training import Training, same


def load_anew(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def reset_one(training: Training) -> None:
    state = training.optimizer.state
    parameter = training.model.wide.weight
    state[parameter] = {k: v.clone() * 2 for k, v in state[parameter].items()}


def reset_in_another_order(training: Training) -> None:
    state = training.optimizer.state
    parameter = training.model.wide.weight
    state[parameter] = {k: v.clone() for k, v in state.pop(parameter).items()}


@pytest.mark.parametrize("mode", ["lazy", "backward", "sharded"])
@pytest.mark.parametrize("change", [load_anew, reset_one, reset_in_another_order])
def test_optimizer_state_that_is_replaced_is_saved_as_it_is_then(
    tmp_path: Path, mode: str, change: Callable[[Training], None]
) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=2, mode=mode, engine="sync"
    ) as c:
        training.steps(3)
        change(training)
        training.steps(4)
        c.wait()
        expected = training.state()
    training.close()
    other = Training(tmp_path)
    with sapwood.Checkpointer(other.run, tmp_path / "ckpts", engine="sync") as c:
        assert c.restore_latest().step == 4  # type: ignore[union-attr]
    assert same(other.state(), expected)
    other.close()


class Odd(torch.optim.Optimizer):
    """Momentum under a key of its choice, and something that is of no parameter."""

    def __init__(self, parameters: Any, key: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["global"] = self.state.get("global", 0) + 1
        self.state.setdefault("norms", []).append(torch.tensor(float(self.state["global"])))
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.key not in state:
                state[self.key] = torch.zeros_like(parameter)
            state["count"] = state.get("count", 0) + 1
            state[self.key].mul_(0.9).add_(parameter.grad)
            parameter.add_(state[self.key], alpha=-0.1)


def train(folder: Path, key: Any, steps: int) -> tuple[Any, list[Tensor]]:
    model = nn.Linear(4, 3)
    optimizer = Odd(model.parameters(), key)
    run = sapwood.Run(model, optimizer, folder=folder / "runs")
    with sapwood.Checkpointer(run, folder / "ckpts", every=2, engine="sync", mode="sharded") as c:
        c.restore_latest()
        while run.step_count < steps:
            run.model(torch.full((2, 4), float(run.step_count))).sum().backward()
            run.step()
        c.wait()
        assert c.stats.failures == []
    run.close()
    found = copy.deepcopy(optimizer.state_dict()["state"])
    return found, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("key", ["momentum", "a/b", "/", 0, ("a", 1)])
def test_optimizer_state_under_any_key_comes_back(tmp_path: Path, key: Any) -> None:
    torch.manual_seed(0)
    expected = train(tmp_path / "whole", key, 6)
    torch.manual_seed(0)
    train(tmp_path / "parts", key, 4)
    state, weights = train(tmp_path / "parts", key, 6)
    assert state.keys() == expected[0].keys()
    assert all(same_value(state[k], expected[0][k]) for k in state)
    assert all(map(torch.equal, weights, expected[1]))


def test_a_key_with_a_slash_in_an_older_checkpoint_is_still_its_parameters() -> None:
    """They had every tensor in a file, under the parameter's name, a slash, and the key."""
    model = nn.Linear(4, 3)
    optimizer = Odd(model.parameters(), "a/b")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    entries, tensors = [], {}
    for name, parameter in model.named_parameters():
        value = optimizer.state[parameter]["a/b"]
        entries.append(
            Entry(
                file="optimizer",
                name=f"{name}/a/b",
                dtype="F32",
                shape=tuple(value.shape),
                holders=(0,),
            )
        )
        tensors[entries[-1].key] = value.numpy().reshape(-1).view("u1").copy()
    common = {
        "groups": [{"lr": 0.1}],
        "optimizer": {name: {"count": 1} for name, _ in model.named_parameters()},
    }
    given = GivenState(catalog=Catalog(tuple(entries)), tensors=tensors, common=common, mine={})
    for state in (optimizer.state[p] for p in model.parameters()):
        state.clear()
    apply_optimizer(dict(model.named_parameters()), optimizer, given)
    found = optimizer.state_dict()["state"]
    assert all(same_value(found[n], {k: expected[n][k] for k in found[n]}) for n in (0, 1))
    assert all(set(found[n]) == {"a/b", "count"} for n in (0, 1))
