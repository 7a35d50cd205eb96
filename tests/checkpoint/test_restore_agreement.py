"""Ranks restore the same checkpoint or none, and never wait for one that went another way."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.errors import CheckpointError, ConfigError
from sapwood.state import plain
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.checkpoint.stateful import Box
from tests.checkpoint.test_restore import LOCAL, flip, own_node, shard_file, train
from tests.checkpoint.training import Training, same

State = dict[str, torch.Tensor]
OPTIONS: dict[str, Any] = {"engine": "sync", "keep": None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[State]]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, ranks.spawn(train, 3, folder, LOCAL, env=own_node)


def restore(folder: Path) -> tuple[int, State, tuple[str, ...], float]:
    training = Training(folder, timeout=20)
    with sapwood.Checkpointer(training.run, folder / "ckpts", tiers=LOCAL, **OPTIONS) as c:
        begin = time.monotonic()
        loaded = c.restore_latest()
        seconds = time.monotonic() - begin
        assert loaded is not None
    state = training.state()
    training.close()
    return loaded.step, state, loaded.skipped, seconds


@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_a_damaged_shard_that_is_not_the_last(
    trained: tuple[Path, list[list[State]]], tmp_path: Path, suffix: str
) -> None:
    folder, states = trained
    shutil.copytree(folder / "ckpts", tmp_path / "ckpts")
    flip(shard_file(tmp_path, 0, 4, suffix))
    flip(shard_file(tmp_path, 1, 4, "bin"))  # two ranks find something, each something else
    found = ranks.spawn(restore, 3, tmp_path, env=own_node)
    for number, (step, state, skipped, seconds) in enumerate(found):
        assert step == 2
        assert same(state, states[number][1])
        assert any("00000004" in note for note in skipped)
        assert seconds < 10


class Fussy:
    """Takes its state on rank 0 only."""

    def state_dict(self) -> dict[str, int]:
        return {"rank": rank()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict["rank"]:
            raise ValueError("not on this rank")


def refuse(folder: Path) -> tuple[str, bool, int]:
    training = Training(folder, timeout=20)
    fussy = Fussy()
    with sapwood.Checkpointer(training.run, folder / "ckpts", own={"fussy": fussy}, **OPTIONS) as c:
        training.steps(2)
        c.save()
        training.steps(4)
        weights = {n: t.detach().clone() for n, t in training.run.tensors().items()}
        with pytest.raises(CheckpointError) as error:
            c.restore_latest()
        unchanged = same(weights, dict(training.run.tensors()))
    step = training.run.step_count
    training.close()
    return str(error.value), unchanged, step


def test_what_one_rank_refuses_no_rank_takes(tmp_path: Path) -> None:
    found = ranks.spawn(refuse, 2, tmp_path)
    assert "rank 1 cannot take" in found[0][0]
    assert "not on this rank" in found[0][0]
    assert "fussy did not take its saved state" in found[1][0]
    assert [rest for _, *rest in found] == [[True, 4], [True, 4]]


def refuse_late(folder: Path) -> tuple[list[str], int, bool, str]:
    """Rank 0 has taken everything when rank 1 refuses."""
    training = Training(folder, timeout=20)
    box, fussy = Box(1), Fussy()
    with sapwood.Checkpointer(
        training.run, folder / "ckpts", shared={"box": box}, own={"fussy": fussy}, **OPTIONS
    ) as c:
        training.steps(2)
        c.save()
        training.steps(4)
        before = training.state(), training.scheduler.last_epoch
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("sapwood").addHandler(handler)
        with pytest.raises(CheckpointError):
            c.restore_latest()
        unchanged = same(training.state(), before[0])
        epochs = training.scheduler.last_epoch - before[1]
    training.close()
    return [text for text in said if "a restore failed" in text], epochs, unchanged, "box"


def test_a_restore_that_one_rank_refuses_leaves_schedulers_and_random_numbers(
    tmp_path: Path,
) -> None:
    for texts, epochs, unchanged, name in ranks.spawn(refuse_late, 2, tmp_path):
        assert unchanged
        assert epochs == 0
        assert len(texts) == 1
        assert name in texts[0]
        assert "fussy" in texts[0]


def test_what_cannot_be_decoded_changes_nothing(tmp_path: Path) -> None:
    training, box = Training(tmp_path), Box(1)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", shared={"a": Box(2)}, own={"box": box}, **OPTIONS
    ) as c:
        training.steps(2)
        c.save()
        training.steps(4)
        box.value = 5
        c._extras.shared["a"].value = 6
        before = training.state(), training.scheduler.last_epoch
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(plain._KINDS, "array")  # as of a newer version; numpy's numbers have one
            with pytest.raises(CheckpointError, match="does not know"):
                c.restore_latest()
        assert same(training.state(), before[0])
        assert training.scheduler.last_epoch == before[1]
        assert (box.value, c._extras.shared["a"].value) == (5, 6)
    training.close()


def test_a_name_of_the_runs_own_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="'scheduler 0'"):
        sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", shared={"scheduler 0": Box()}, **OPTIONS
        )
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", shared={"scheduler 0": training.scheduler}, **OPTIONS
    ):
        training.steps(1)
    training.close()
