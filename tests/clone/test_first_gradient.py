"""A clone's state is whole before its first update, and in its first checkpoint, however the script
calls its model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sapwood
from sapwood.testing import ranks
from tests.clone.forking import MORE, digest, home_of, order, told_to_stop


class Parts(nn.Module):
    """Whose forward gives nothing back, or back-propagates itself, if it is called at all."""

    loss: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(8, 64)
        self.second = nn.Linear(64, 4)

    def apart(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).pow(2).mean()

    def forward(self, x: Tensor) -> None:
        self.loss = self.apart(x)
        if self.way == "backward in forward":
            self.loss.backward()


WAYS = ("part by part", "no output", "backward in forward")


class Training:
    def __init__(self, folder: Path, way: str) -> None:
        torch.manual_seed(0)
        self.way, self.model = way, Parts(way)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.run = sapwood.Run(self.model, self.optimizer, folder=folder / "runs", timeout=30)
        self.states: dict[int, str] = {}

    def step(self) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.run.step_count))
        if self.way == "part by part":
            self.model.loss = self.model.apart(x)
        else:
            self.run.model(x)
        if self.way != "backward in forward":
            self.model.loss.backward()
        self.run.step()
        self.states[self.run.step_count] = self.state()

    def state(self) -> str:
        found = {name: tensor.detach() for name, tensor in self.run.tensors().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = torch.as_tensor(value)
        return digest(found)


def donate(folder: Path, way: str) -> dict[int, str]:
    training = Training(folder, way)
    run = training.run
    run.allow_clones()
    ranks.mark("open")
    last = None
    while last is None or run.step_count < last:
        training.step()
        time.sleep(0.005)
        if last is None and told_to_stop(run, folder):
            last = run.step_count + MORE
    run.close()
    return training.states


def receive(folder: Path, way: str) -> dict[int, str]:
    training = Training(folder, way)
    for _ in range(MORE):
        training.step()
    training.run.close()
    return training.states


def save_at_once(folder: Path, way: str) -> dict[int, str]:
    """The first thing a clone does is a checkpoint, which is then restored."""
    training = Training(folder, way)
    run = training.run
    begun = run.step_count
    with sapwood.Checkpointer(run, folder / "ckpts", engine="sync") as c:
        c.save()
        training.step()
        c.restore(begun)
        found = {begun: training.state()}
    run.close()
    return found


def forked(folder: Path, world: int, clone: Any, way: str) -> tuple[Any, Any]:
    with ranks.start(donate, world, folder, way) as group:
        for rank in range(world):
            group.wait_mark("open", rank=rank, timeout=60)
        clones = ranks.spawn(clone, world, folder, way, env=order(home_of(folder)))
        (folder / "stop").touch()
        donors = [outcome.value for outcome in group.wait(timeout=60)]
    return donors, clones


@pytest.mark.parametrize(("way", "world"), [*((way, 1) for way in WAYS), (WAYS[0], 2)])
def test_a_model_that_is_called_in_another_way_goes_on_as_its_donor(
    tmp_path: Path, way: str, world: int
) -> None:
    donors, clones = forked(tmp_path, world, receive, way)
    for donor, clone in zip(donors, clones, strict=True):
        assert len(clone) == MORE
        assert clone == {step: donor[step] for step in clone}


def test_a_checkpoint_before_the_first_step_is_of_the_parent_s_state(tmp_path: Path) -> None:
    donors, clones = forked(tmp_path, 1, save_at_once, WAYS[0])
    ((step, state),) = clones[0].items()
    assert state == donors[0][step]
