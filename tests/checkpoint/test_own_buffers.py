"""Buffers that ranks do not share: a checkpoint and a fork have rank 0's, and no mixture of all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import sapwood
from sapwood.testing import ranks
from tests.checkpoint.training import Training
from tests.clone.forking import digest, home_of, order, told_to_stop

ENV = {"SAPWOOD_CHECKPOINT_LINGER": "0.2"}


def buffers(training: Training) -> str:
    return digest({name: tensor.detach() for name, tensor in training.model.named_buffers()})


def save(folder: Path, mode: str) -> str:
    training = Training(folder, broadcast_buffers=False)
    with sapwood.Checkpointer(training.run, folder / "ckpts", mode=mode, every=3) as c:
        training.steps(3)
        found = buffers(training)
        c.wait()
    training.close()
    return found


def restore(folder: Path) -> str:
    training = Training(folder, broadcast_buffers=False)
    with sapwood.Checkpointer(training.run, folder / "ckpts") as c:
        assert c.restore_latest()
        found = buffers(training)
    training.close()
    return found


@pytest.mark.parametrize("mode", ["lazy", "sharded"])
def test_a_checkpoint_has_rank_0s(tmp_path: Path, mode: str) -> None:
    saved = ranks.spawn(save, 2, tmp_path, mode, env=ENV)
    assert saved[0] != saved[1]
    assert ranks.spawn(restore, 2, tmp_path, env=ENV) == [saved[0]] * 2


def donate(folder: Path) -> dict[int, str]:
    training = Training(folder, broadcast_buffers=False, timeout=30)
    training.run.allow_clones()
    ranks.mark("open")
    found: dict[int, str] = {}
    while not told_to_stop(training.run, folder):
        training.step()
        found[training.run.step_count] = buffers(training)
        time.sleep(0.005)
    training.close()
    return found


def receive(folder: Path) -> tuple[int, str]:
    training = Training(folder, broadcast_buffers=False, timeout=30)
    training.run.wait_ready()
    found = training.run.step_count, buffers(training)
    training.close()
    return found


def test_a_fork_has_rank_0s(tmp_path: Path) -> None:
    with ranks.start(donate, 2, tmp_path) as group:
        for rank in range(2):
            group.wait_mark("open", rank=rank, timeout=60)
        clones = ranks.spawn(receive, 2, tmp_path, env=order(home_of(tmp_path)))
        (tmp_path / "stop").touch()
        donors = [outcome.value for outcome in group.wait(timeout=60)]
    step, _ = clones[0]
    assert donors[0][step] != donors[1][step]
    assert clones == [(step, donors[0][step])] * 2
