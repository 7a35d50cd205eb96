"""A checkpoint that cannot be saved: the training hears of it, and in the end cannot ignore it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.buffers import Arena
from sapwood.checkpoint import pool
from sapwood.checkpoint.failures import Failures
from sapwood.checkpoint.report import CheckpointStats
from sapwood.errors import CheckpointError, ConfigError, SubscriberError
from sapwood.testing import faults
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.stateful import Box, Broken
from tests.checkpoint.training import Training

MODES = ["lazy", "backward", "sharded"]


def checkpointer(training: Training, folder: Path, **options: Any) -> sapwood.Checkpointer:
    settings = {"engine": "sync", "mode": "lazy", "keep": None, **options}
    return sapwood.Checkpointer(training.run, folder / "ckpts", **settings)


@pytest.mark.parametrize("engine", ["sync", "node"])
@pytest.mark.parametrize("mode", MODES)
def test_state_that_cannot_be_taken_is_warned_of_and_counted(
    tmp_path: Path, mode: str, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Training(tmp_path / "plain")
    losses = plain.steps(8)
    plain.close()
    training, broken = Training(tmp_path), Broken()
    with checkpointer(
        training, tmp_path, mode=mode, engine=engine, every=1, shared={"broken": broken}
    ) as c:
        got = training.steps(4)
        c.wait()
        assert [f.step for f in c.stats.failures] == [1, 2, 3, 4]
        for failure in c.stats.failures:
            assert "broken" in failure.reason
            assert "ZeroDivisionError: the user's own mistake" in failure.reason
        assert c.stats.failures_in_a_row == 4
        assert c.stats.saves == []
        broken.broken = False
        got += training.steps(6)
        c.wait()
        assert c.stats.failures_in_a_row == 0
        broken.broken = True
        got += training.steps(8)  # only those in a row count
        assert c.restore_latest().step == 6  # type: ignore[union-attr]
    training.close()
    assert got == losses
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("is not saved" in text and "own mistake" in text for text in warnings) == 6


def test_after_max_failures_in_a_row_the_training_is_told_by_an_exception(tmp_path: Path) -> None:
    training, broken = Training(tmp_path), Broken()
    with checkpointer(training, tmp_path, every=1, own={"broken": broken}, max_failures=3) as c:
        training.steps(2)
        for step in (3, 4):
            with pytest.raises(SubscriberError, match=f"step {step} is not saved") as found:
                training.step()
            assert isinstance(found.value.__cause__, CheckpointError)
            assert "own mistake" in str(found.value)
            assert f"{step} checkpoints in a row" in str(found.value)
        broken.broken = False
        training.steps(6)
        c.wait()
        assert [s.id.step for s in c.stats.saves] == [5, 6]
        broken.broken = True
        training.steps(8)
    training.close()


def test_an_older_checkpoint_that_is_durable_late_does_not_take_back_a_failure() -> None:
    stats = CheckpointStats()
    failures = Failures(stats, 2)
    for step in (4, 5):
        failures.add(step, CheckpointError(f"step {step} is not saved"))
    failures.saved(3)
    assert stats.failures_in_a_row == 2
    with pytest.raises(CheckpointError, match="2 checkpoints in a row"):
        failures.check()
    failures.add(6, CheckpointError("step 6 is not saved"))
    failures.saved(5)
    assert stats.failures_in_a_row == 1
    failures.check()
    failures.go_back()  # to step 1, say
    failures.saved(2)
    assert stats.failures_in_a_row == 0


def test_no_limit_and_wrong_limits(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(
        training, tmp_path, every=1, own={"broken": Broken()}, max_failures=None
    ) as c:
        training.steps(20)
        assert c.stats.failures_in_a_row == 20
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match="max_failures"):
            checkpointer(training, tmp_path, max_failures=wrong)
    training.close()


def test_save_raises_what_keeps_it_from_saving_and_may_be_tried_again(tmp_path: Path) -> None:
    training, broken = Training(tmp_path), Broken()
    with checkpointer(training, tmp_path, own={"broken": broken}, max_failures=1) as c:
        training.step()
        for _ in range(3):
            with pytest.raises(CheckpointError, match=r"step 1 is not saved.*own mistake"):
                c.save()
        training.step()  # what save() has raised is not raised once more
        broken.broken = False
        assert c.save().id.step == 2
        assert c.restore_latest().step == 2  # type: ignore[union-attr]
        assert len(c.stats.failures) == 3
    training.close()


def test_tiers_that_take_nothing_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    tiers = ["memory", TierSpec(kind="external", retries=0)]
    with checkpointer(training, tmp_path, tiers=tiers, max_failures=3) as c:
        with faults.inject("files", "raise", at=None):
            for step in (1, 2):
                training.step()
                report = c.save()
                assert set(report.failed) == {"external"}
                assert c.stats.failures_in_a_row == step
            training.step()
            with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
                c.save()
        assert "tier external: " in c.stats.failures[-1].reason
        training.step()
        c.save()
        assert c.stats.failures_in_a_row == 0
    training.close()
    assert "step 2 is not saved: tier external" in caplog.text


@pytest.mark.parametrize("call", ["step", "wait"])
def test_tiers_that_fail_behind_the_training_are_told_of_later(tmp_path: Path, call: str) -> None:
    training = Training(tmp_path)
    tiers = [TierSpec(kind="external", retries=0)]
    with checkpointer(training, tmp_path, tiers=tiers, every=2, max_failures=1) as c:
        with faults.inject("files", "raise", at=None):
            training.step()
            training.step()
            c._saver.drain(30)
        with pytest.raises((CheckpointError, SubscriberError), match="step 2 is not saved"):
            {"step": training.step, "wait": c.wait}[call]()
        training.steps(4)
        c.wait()
    training.close()


def test_one_tier_of_two_that_fails_is_no_failed_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path)
    tiers = ["local", TierSpec(kind="external", retries=0)]
    home = tmp_path / "ckpts"

    def external(**facts: Any) -> bool:
        path = facts["path"]
        return home in path.parents and home / "nodes" not in (path, *path.parents)

    with checkpointer(training, tmp_path, tiers=tiers) as c:
        training.step()
        with faults.inject("files", "raise", at=None, when=external):
            report = c.save()
        assert (set(report.durable), set(report.failed)) == ({"local"}, {"external"})
        assert c.stats.failures == []
    training.close()


def test_the_last_checkpoint_that_failed_is_said_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, box = Training(tmp_path), Box(object())
    with checkpointer(training, tmp_path, every=2, shared={"box": box}):
        training.steps(2)
    training.close()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("the last checkpoint was not saved" in text and "box" in text for text in errors)


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_cannot_be_saved_is_told_of_every_time_and_ends_nothing(
    tmp_path: Path, mode: str
) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path, mode=mode, every=2) as c:
        training.steps(3)
        training.model.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))
        for step in (4, 6):
            with pytest.raises(SubscriberError, match=f"step {step} is not saved: model odd is"):
                training.steps(step)
            assert training.run.step_count == step
            training.step()
        with pytest.raises(CheckpointError, match="step 7 is not saved: model odd is"):
            c.save()
        del training.model.odd
        c.save()
        training.steps(8)
        c.wait()
        assert [s.id.step for s in c.stats.saves] == [2, 7, 8]
        assert [f.step for f in c.stats.failures] == [4, 6, 7]
    training.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_where_there_was_no_memory_for_staging_once_the_next_step_is_saved(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [failing]

    def arena(*args: Any, **options: Any) -> Arena:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Arena(*args, **options)

    training = Training(tmp_path)
    with checkpointer(training, tmp_path, every=1, mode="sharded", patience=0) as c:
        monkeypatch.setattr(pool, "Arena", arena)
        training.steps(4)
        c.wait()
        assert [f.step for f in c.stats.failures] == [1]
        assert "Cannot allocate memory" in c.stats.failures[0].reason
        assert [s.id.step for s in c.stats.saves] == [2, 3, 4]
        assert not c.stats.skipped
    training.close()
