"""Tensors without elements, expanded ones, and other optimizers: taken whole, or refused whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.errors import CheckpointError
from tests.checkpoint.training import Training, same


class Odd(nn.Module):
    """A parameter and a buffer without elements, and a buffer of one element seen six times."""

    def __init__(self, value: float = 1.0, *, expanded: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("no_rows", torch.empty(0, 2))
        scale = torch.full((1, 3), value).expand(2, 3)
        self.register_buffer("scale", scale if expanded else scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.mean() + self.nothing.sum()


class Run:
    def __init__(self, folder: Path, model: Odd, mode: str = "sharded", **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.run = sapwood.Run(model, self.optimizer, folder=folder / "runs")
        self.ckpt = sapwood.Checkpointer(
            self.run, folder / "ckpts", engine="sync", every=1, mode=mode, **options
        )

    def step(self) -> None:
        self.run.model(torch.ones(2, 4)).sum().backward()
        self.run.step()

    def state(self) -> dict[str, Tensor]:
        found = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
        for n, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{n}/{key}"] = value.clone()
        return found

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()
        self.run.close()


@pytest.mark.parametrize("mode", ["sharded", "lazy"])
def test_tensors_without_elements_and_expanded_ones_come_back(tmp_path: Path, mode: str) -> None:
    with Run(tmp_path, Odd(3.0), mode) as one:
        one.step()
        kept = one.state()
        one.model.scale[0].fill_(7.0)  # all rows: they share their memory
        one.step()
        one.ckpt.restore(1)
        assert same(one.state(), kept)
    for expanded in (True, False):
        with Run(tmp_path, Odd(expanded=expanded), mode) as again:
            found = again.ckpt.restore(1)
            assert found.skipped == ()
            assert same(again.state(), kept)
            again.step()


def test_an_expanded_tensor_that_cannot_hold_its_values_changes_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, Odd(expanded=False)) as one:
        one.model.scale[0].fill_(7.0)
        one.step()
    with Run(tmp_path, Odd()) as other:
        before = other.state()
        with pytest.raises(CheckpointError, match="scale is expanded here"):
            other.ckpt.restore_latest()
        assert same(other.state(), before)
        assert other.run.step_count == 0


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    training = Training(tmp_path, "sgd")
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", engine="sync") as c:
        training.steps(2)
        c.save()
    training.close()
    other = Training(tmp_path, "adamw")
    other.optimizer.param_groups[0]["lr"] = 0.5
    with sapwood.Checkpointer(other.run, tmp_path / "ckpts", engine="sync") as c:
        before = other.state()
        with pytest.raises(CheckpointError, match=r"the optimizer is AdamW, the checkpoint's SGD"):
            c.restore_latest()
        assert same(other.state(), before)
        assert c.restore_latest(optimizer=False) is not None
    other.close()


@pytest.mark.parametrize("mode", ["lazy", "backward", "sharded"])
def test_a_parameter_moved_to_other_memory_is_saved_from_there(tmp_path: Path, mode: str) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", every=1, mode=mode) as c:
        training.steps(2)
        weight = training.model.head.weight
        weight.data = weight.data.clone()
        training.step()
        c.wait()
        expected = weight.detach().clone()
        weight.data.zero_()
        c.restore(3)
        assert torch.equal(weight, expected)
    training.close()


class Shaped(nn.Module):
    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("square", torch.arange(64.0).view(8, 8))
        self.register_buffer("history", torch.arange(float(rows)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("mode", ["sharded", "lazy"])
def test_a_buffer_with_another_form_in_the_same_memory_is_saved_in_that_form(
    tmp_path: Path, mode: str
) -> None:
    def run(model: Shaped) -> Run:
        return Run(tmp_path, model, mode)  # type: ignore[arg-type]

    model = Shaped()
    with run(model) as training:
        training.step()
        model.square.data = model.square.data.t()
        model.history.resize_(3)
        training.step()
        training.ckpt.wait()
        expected = training.state()
    with run(Shaped(3)) as training:
        assert training.ckpt.restore_latest().step == 2  # type: ignore[union-attr]
        assert same(training.state(), expected)
