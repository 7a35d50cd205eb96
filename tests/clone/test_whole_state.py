"""A clone has all that its donor's state dicts hold, and goes on bit for bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.testing import ranks
from tests.clone.forking import home_of, order, until

MORE = 3


class Net(nn.Module):
    """Rebinds a buffer, counts its forward passes, and has an expanded and a conjugated buffer."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("wide", torch.randn(1, 3).expand(2, 3))
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.layer(x) * self.wide * self.conjugated.abs() / self.count
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y + self.mean


class Plain(torch.optim.Optimizer):
    """Counts in Python numbers, also outside of its parameters, and under a key with a slash.

    With ``rebinds`` it makes a new tensor in every step, as Adafactor of transformers does.
    """

    def __init__(self, parameters: Any, rebinds: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rebinds = rebinds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("mean/1", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            size = state.get("size", p.norm())
            state["size"] = size + p.norm() if self.rebinds else size.copy_(p.norm())
            scale = self.param_groups[0]["lr"] / state["step"] / self.state["all"]["steps"]
            p.sub_(state["mean/1"] * state["size"], alpha=scale)


class Training:
    def __init__(self, folder: Path, rebinds: bool) -> None:
        torch.manual_seed(time.time_ns() % 1000)
        self.net = Net()
        self.optimizer = Plain(self.net.parameters(), rebinds)
        self.run = sapwood.Run(self.net, self.optimizer, folder=folder / "runs")

    def step(self) -> float:
        number = self.run.step_count
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number % 7)  # as nanoGPT's loop does
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        loss = self.run.model(x).pow(2).mean()
        loss.backward()
        self.run.step()
        return float(loss.detach())


def donate(folder: Path, rebinds: bool, **settings: Any) -> dict[int, float]:
    training = Training(folder, rebinds)
    training.run.allow_clones(**settings)
    ranks.mark("open")
    losses: dict[int, float] = {}
    ended, deadline = None, time.monotonic() + 40
    while ended is None or training.run.step_count < ended + MORE:
        loss = training.step()
        losses[training.run.step_count] = loss
        time.sleep(0.005)
        if ended is None and ((folder / "stop").exists() or time.monotonic() > deadline):
            ended = training.run.step_count
    training.run.close()
    return losses


def receive(folder: Path, rebinds: bool) -> dict[int, float]:
    training = Training(folder, rebinds)
    losses = {}
    for _ in range(MORE):
        loss = training.step()
        losses[training.run.step_count] = loss
    training.run.close()
    return losses


@pytest.mark.parametrize(
    ("rebinds", "approach"), [(False, "deepclone"), (True, "lazy"), (True, "p2p"), (True, "file")]
)
def test_a_clone_goes_on_with_all_of_it(tmp_path: Path, rebinds: bool, approach: str) -> None:
    with ranks.start(donate, 1, tmp_path, rebinds, approach=approach) as group:
        group.wait_mark("open", rank=0, timeout=60)
        until(lambda: home_of(tmp_path).exists(), "an address")
        (clone,) = ranks.spawn(receive, 1, tmp_path, rebinds, env=order(home_of(tmp_path)))
        (tmp_path / "stop").touch()
        (donor,) = (outcome.value for outcome in group.wait(timeout=60))
    assert clone == {step: donor[step] for step in clone}


def test_a_tensor_that_is_replaced_after_it_was_sent_is_named(tmp_path: Path) -> None:
    with ranks.start(donate, 1, tmp_path, True) as group:
        group.wait_mark("open", rank=0, timeout=60)
        with pytest.raises(sapwood.SapwoodError, match=r"layer.*/size was replaced.*approach lazy"):
            ranks.spawn(receive, 1, tmp_path, True, env=order(home_of(tmp_path)))
        (tmp_path / "stop").touch()
        assert group.wait(timeout=60)[0].value
