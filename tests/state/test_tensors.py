"""A tensor has one name, whatever is wrapped around the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sapwood.state.optimizers import optimizer_tensors
from sapwood.state.tensors import (
    clean_name,
    describe_model,
    named_buffers,
    named_parameters,
)
from sapwood.testing import ranks


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.first.weight
        self.my_orig_mod = nn.Linear(3, 1)


NAMES = [
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "tied.bias",
    "my_orig_mod.weight",
    "my_orig_mod.bias",
]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def compiled(model: nn.Module) -> nn.Module:
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("a.weight", "a.weight"),
        ("_orig_mod.a.weight", "a.weight"),
        ("a._orig_mod.weight", "a.weight"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("a._orig_mods.b", "a._orig_mods.b"),
    ],
)
def test_clean_name_takes_away_whole_parts_only(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize("wrap", [lambda m: m, compiled])
def test_names_are_the_same_with_and_without_compile(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = wrap(Small())
    assert list(named_parameters(model)) == NAMES
    assert list(named_buffers(model)) == BUFFERS
    assert describe_model(model) == describe_model(Small())


def test_a_compiled_part_keeps_its_names() -> None:
    model = Small()
    model.first = compiled(model.first)  # type: ignore[assignment]
    assert sorted(named_parameters(model)) == sorted(NAMES)


def names_in_ddp() -> list[list[str]]:
    ddp = nn.parallel.DistributedDataParallel
    return [
        list(named_parameters(ddp(Small()))),
        list(named_parameters(ddp(compiled(Small())))),
        list(named_parameters(compiled(ddp(Small())))),
        list(named_buffers(compiled(ddp(Small())))),
    ]


def test_names_are_the_same_inside_ddp() -> None:
    assert ranks.spawn(names_in_ddp, 1, init=True) == [[NAMES, NAMES, NAMES, BUFFERS]]


def test_tensors_are_the_models_own() -> None:
    model = Small()
    found = named_parameters(compiled(model))
    assert found["first.weight"] is model.first.weight
    assert named_buffers(model)["norm.running_mean"] is model.norm.running_mean


def test_training_buffers_are_those_of_modules_in_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[0].eval()
    assert list(named_buffers(model, training_only=True)) == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    model.eval()
    assert named_buffers(model, training_only=True) == {}


def test_a_shared_buffer_has_the_same_name_in_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    model[0].eval()
    found = named_buffers(model, training_only=True)
    assert found.keys() <= named_buffers(model).keys()
    assert "0.running_mean" in found


def test_optimizer_tensors_are_named_as_the_optimizer_does() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer_tensors(optimizer, model.weight) == {}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer_tensors(optimizer, model.weight)
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"] is optimizer.state[model.weight]["exp_avg"]
    optimizer.state[model.weight]["note"] = "not a tensor"
    assert "note" not in optimizer_tensors(optimizer, model.weight)


def test_the_description_shows_what_ranks_must_share() -> None:
    model = Small()
    model.first.bias.requires_grad_(False)
    model.double()
    lines = describe_model(model)
    assert lines[0] == "parameter first.weight: shape (3, 2), float64, on cpu, trained"
    assert lines[1] == "parameter first.bias: shape (3,), float64, on cpu, frozen"
    assert lines[-1] == "buffer norm.num_batches_tracked: shape (), int64, on cpu"
    assert len(lines) == len(NAMES) + len(BUFFERS)
