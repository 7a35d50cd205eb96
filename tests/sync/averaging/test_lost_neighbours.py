"""A neighbour that is killed is noticed by ranks that wait for it outside of averaging, too."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import sapwood
from sapwood.errors import PeerFailed
from sapwood.testing import ranks

BOUND = 60.0
"""Far below the run's timeout, which a rank that notices nothing would wait for."""


def make(folder: str) -> sapwood.Run:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sapwood.Run(model, optimizer, folder=folder, averaging="node")


def wait_for_others(folder: str, victim: int) -> str:
    run = make(folder)
    ranks.mark("made")
    if run.group.rank == victim:
        time.sleep(BOUND)
    try:
        sapwood.Checkpointer(run, f"{folder}/ckpts")
    except PeerFailed as error:
        return str(error)
    finally:
        run.close()
    raise AssertionError("the others were there")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_before_the_first_step_is_told_to_who_waits(
    tmp_path: Path, victim: int
) -> None:
    with ranks.start(wait_for_others, 3, str(tmp_path), victim) as group:
        for rank in range(3):
            group.wait_mark("made", rank=rank)
        group.kill(victim, signal.SIGKILL)
        outcomes = group.wait(BOUND)
    for one in outcomes:
        if one.rank != victim:
            assert one.ok, one.describe()
            text = one.value
            assert "died or was killed" in text
            assert f"rank {victim}" in text


def compute(folder: str) -> None:
    run = make(folder)
    ranks.mark("made")
    time.sleep(BOUND)  # no step, no collective
    run.close()


def test_a_signal_ends_a_rank_whose_neighbour_was_killed(tmp_path: Path) -> None:
    with ranks.start(compute, 2, str(tmp_path)) as group:
        for rank in range(2):
            group.wait_mark("made", rank=rank)
        group.kill(1, signal.SIGKILL)
        group.kill(0, signal.SIGTERM)
        (outcome,) = group.wait(BOUND / 2, ranks=[0])
    assert outcome.signal == signal.SIGTERM, outcome.describe()
