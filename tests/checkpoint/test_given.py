"""What a Checkpointer is given, and what it was given too late: refused or said, and at once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sapwood
from sapwood.errors import CheckpointError, ConfigError, UsageError
from sapwood.testing import faults
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.stateful import Box
from tests.checkpoint.training import Training


def checkpointer(training: Training, folder: Path, **options: Any) -> sapwood.Checkpointer:
    return sapwood.Checkpointer(training.run, folder / "ckpts", engine="sync", **options)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"shared": [1]}, "shared is a list"),
        ({"shared": {"a": 1}}, r"shared\['a'\] is a int, which has no state_dict"),
        ({"own": {"a": {}}}, r"own\['a'\] is a dict, which has no state_dict"),
        ({"own": {1: Box()}}, "own has the name 1"),
        ({"shared": {"scheduler 0": Box()}}, "the run's own is called"),
        ({"retention": 3}, "retention is 3"),
        ({"on_captured": 3}, "on_captured is 3"),
        ({"on_durable": "x"}, "on_durable is 'x'"),
    ],
)
def test_wrong_arguments_are_refused_before_an_engine_starts(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match=told):
        checkpointer(training, tmp_path, **given)
    assert not (tmp_path / "ckpts").exists()
    training.close()


def test_wrong_places_and_runs(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "file").touch()
    for place, told in (
        (3, "place is 3"),
        ("", "place is ''"),
        (tmp_path / "file", "no folder"),
        (tmp_path / "file" / "below", "cannot be a folder"),
        ("a\0b", "cannot be a folder"),
        ("a" * 300, "cannot be a folder"),
    ):
        with pytest.raises(ConfigError, match=told):
            sapwood.Checkpointer(training.run, place)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is a Model, expected a sapwood\.Run"):
        sapwood.Checkpointer(training.model, tmp_path / "ckpts")  # type: ignore[arg-type]
    training.close()
    with pytest.raises(UsageError, match="is closed"):
        checkpointer(training, tmp_path)


def test_what_clones_are_given_is_refused_alike(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for given, told in (({"a": 1}, "has no state_dict"), ({"scheduler 0": Box()}, "run's own")):
        with pytest.raises(ConfigError, match=told):
            training.run.allow_clones(shared=given)  # type: ignore[arg-type]
    training.close()


def test_only_steps_and_ids_are_restored(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path) as c:
        training.step()
        c.save()
        assert c.restore(np.int64(1)).step == 1  # type: ignore[arg-type]
        for wrong in (None, True, 1.0, "1"):
            with pytest.raises(CheckpointError, match="is no checkpoint; expected a step"):
                c.restore(wrong)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"step 7 cannot be restored.*not there"):
            c.restore(7)
    training.close()


def test_metrics_that_come_after_their_step_was_saved_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)

    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if "too late" in r.getMessage()]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING), checkpointer(training, tmp_path, every=1) as c:
        c.metrics["loss"] = 0.5
        training.step()
        assert c.save().metrics == {"loss": 0.5}
        assert c.save({"loss": torch.tensor(0.5)}).metrics == {"loss": 0.5}  # type: ignore[dict-item]
        assert said() == []
        assert c.save({"loss": 0.25, "nan": float("nan")}).metrics == {"loss": 0.5}
        (text,) = said()
        assert "step 1 was saved before" in text
        assert "{'loss': 0.25, 'nan': 'nan'} came too late" in text
        with pytest.raises(ConfigError, match="metrics is a list"):
            c.save([1])  # type: ignore[arg-type]
    training.close()


def test_metrics_may_be_assigned(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path) as c:
        c.metrics = {"loss": 0.5}
        training.step()
        assert c.save().metrics == {"loss": 0.5}
    training.close()


@pytest.mark.parametrize("leaves", ["at the end", "with an error"])
def test_what_failed_last_is_raised_where_the_checkpointer_is_closed(
    tmp_path: Path, leaves: str
) -> None:
    training = Training(tmp_path)
    tiers = [TierSpec(kind="external", retries=0)]

    def loop() -> None:
        with checkpointer(
            training, tmp_path, tiers=tiers, every=2, max_failures=1, mode="lazy"
        ) as c:
            training.steps(2)
            if leaves == "with an error":
                raise RuntimeError("an error of the loop's own")
        c.close()

    told = "step 2 is not saved" if leaves == "at the end" else "of the loop's own"
    with (
        faults.inject("files", "raise", at=None),
        pytest.raises((CheckpointError, RuntimeError), match=told),
    ):
        loop()
    training.close()
