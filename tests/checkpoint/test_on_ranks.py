"""Several real ranks: shards, any world to any other, and damage on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.checkpoint.training import Training, same

STEPS = 6
SETTINGS: dict[str, Any] = {"keep": None}


def train(folder: Path, mode: str, engine: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(folder)
    place = folder / "ckpts"
    with sapwood.Checkpointer(
        training.run, place, every=2, mode=mode, engine=engine, **SETTINGS
    ) as c:
        losses = training.steps(STEPS)
        c.wait()
    state = training.state()
    training.close()
    return losses, state


def go_on(folder: Path, step: int, engine: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(folder)
    torch.manual_seed(77)
    with sapwood.Checkpointer(training.run, folder / "ckpts", engine=engine, **SETTINGS) as c:
        c.restore(step)
    losses = training.steps(STEPS)
    state = training.state()
    training.close()
    return losses, state


@pytest.mark.parametrize("engine", ["sync", "node"])
@pytest.mark.parametrize("mode", ["single", "sharded", "backward", "lazy"])
def test_ranks_go_on_bit_for_bit(tmp_path: Path, mode: str, engine: str) -> None:
    trained = ranks.spawn(train, 2, tmp_path, mode, engine)
    for step in (2, 4):
        for (losses, state), (more, end) in zip(
            trained, ranks.spawn(go_on, 2, tmp_path, step, engine), strict=True
        ):
            assert losses[step:] == more
            assert same(state, end)


def restored(folder: Path, engine: str) -> dict[str, torch.Tensor]:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", engine=engine, **SETTINGS) as c:
        loaded = c.restore_latest()
        assert loaded is not None
    state = training.state()
    training.close()
    return {"rank": torch.tensor(rank()), **state}


@pytest.mark.parametrize(
    ("before", "after", "engine"),
    [(1, 3, "sync"), (3, 2, "sync"), (4, 1, "sync"), (1, 2, "node"), (3, 2, "node")],
)
def test_any_number_of_ranks_to_any_other(
    tmp_path: Path, before: int, after: int, engine: str
) -> None:
    expected = ranks.spawn(train, before, tmp_path, "lazy", engine)[0][1]
    for state in ranks.spawn(restored, after, tmp_path, engine):
        shared = [name for name in expected if name != "random"]
        assert all(torch.equal(expected[name], state[name]) for name in shared)
