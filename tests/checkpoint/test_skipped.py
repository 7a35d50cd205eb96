"""Steps that find no staging memory: not saved, told of, and in the end an exception."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

import sapwood
from sapwood.checkpoint import saver
from sapwood.errors import CheckpointError, SubscriberError
from tests.checkpoint.training import Training


class Clock:
    """The time module, as of so many seconds later."""

    later = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.later


def test_a_tier_that_takes_nothing_for_longer_than_drain_timeout_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(saver, "time", clock)
    training = Training(tmp_path)
    options = {"engine": "sync", "mode": "lazy", "every": 2, "patience": 0.01, "max_failures": 2}
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", **options) as c:
        training.steps(2)
        c.wait()
        pool = c._saver._pool
        taken = []
        while (staging := pool.take()) is not None:  # as if a tier were still reading them
            taken.append(staging.number)
        training.steps(8)
        # A slow tier is no failure of checkpoints, however many steps it costs.
        assert (c.stats.skipped, c.stats.failures) == ([4, 6, 8], [])
        clock.later = 601
        training.steps(10)
        assert [f.step for f in c.stats.failures] == [10]
        training.step()
        with pytest.raises(SubscriberError) as told:
            training.step()
        assert isinstance(told.value.__cause__, CheckpointError)
        assert "2 checkpoints in a row were not saved" in str(told.value.__cause__)
        for number in taken:
            c._saver.freed(number)
        training.steps(15)
        c.wait()
        assert c.stats.failures_in_a_row == 0
        assert c.stats.skipped == [4, 6, 8, 10, 12]
    training.close()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("earlier checkpoints have not been written" in text for text in said) == 5


def test_memory_that_becomes_free_while_a_step_is_given_up_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path)
    options = {"engine": "sync", "mode": "lazy", "every": 2, "patience": 0.01}
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", **options) as c:
        training.steps(2)
        c.wait()
        taken = []
        while (staging := c._saver._pool.take()) is not None:
            taken.append(staging.number)

        def absent(step: int, round: int) -> None:  # the engine's thread comes in that moment
            while taken:
                c._saver.freed(taken.pop())

        monkeypatch.setattr(c._saver, "_absent", absent)
        training.steps(6)
        c.wait()
        assert (c.stats.skipped, c.stats.failures) == ([4], [])
        assert [s.id.step for s in c.stats.saves] == [2, 6]
    training.close()
