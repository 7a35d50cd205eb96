"""Several Checkpointers on one run, and a run that somebody else sets to another state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sapwood
from sapwood.errors import UsageError
from sapwood.events import TensorUpdated
from sapwood.testing import faults, ranks
from tests.checkpoint.training import Training, same


def checkpointer(training: Training, place: Path, **options: Any) -> sapwood.Checkpointer:
    settings = {"engine": "sync", "keep": None, **options}
    return sapwood.Checkpointer(training.run, place, **settings)


def test_steps_are_saved_after_the_run_was_set_to_another_one_by_hand(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with checkpointer(training, tmp_path / "ckpts", every=2) as c:
        training.steps(3)
        training.run.resume_at(95)
        training.steps(99)
        training.run.resume_at(1)
        training.steps(4)
        c.wait()
        assert [s.id.step for s in c.stats.saves] == [2, 96, 98, 2, 4]
        assert len({s.id for s in c.stats.saves}) == 5
    training.close()


def test_a_run_has_ended_no_fewer_than_no_steps(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(UsageError, match="step is -3"):
        training.run.resume_at(-3)
    with pytest.raises(TypeError):
        training.run.resume_at(1.5)  # type: ignore[arg-type]
    training.run.resume_at(np.int64(3))  # type: ignore[arg-type]
    with checkpointer(training, tmp_path / "ckpts") as c:
        training.step()
        assert c.save().id.step == 4
        c.wait()
        assert c.restore_latest().step == 4  # type: ignore[union-attr]
    training.close()


def restore_one_of_two(folder: Path) -> list[bool]:
    training = Training(folder, timeout=20)
    a = checkpointer(training, folder / "a", every=2)
    b = checkpointer(training, folder / "b")
    training.steps(4)
    b.save()
    first = training.state()
    training.steps(6)
    a.restore(2)
    torch.manual_seed(77)  # another branch
    training.steps(4)
    second = training.state()
    b.save()
    saved = [s.id for s in b.stats.saves]
    training.steps(5)
    found = [not same(first, second)]
    for id, state in zip(saved, (first, second), strict=True):
        b.restore(str(id))
        found.append(same(training.state(), state))
    b.close()
    a.close()
    training.close()
    return found


def test_what_one_restores_the_other_saves_as_another_branch(tmp_path: Path) -> None:
    assert ranks.spawn(restore_one_of_two, 2, tmp_path) == [[True] * 3] * 2


@pytest.mark.parametrize("mode", ["lazy", "backward"])
def test_what_one_restores_is_not_seen_by_what_the_other_still_copies(
    tmp_path: Path, mode: str
) -> None:
    training = Training(tmp_path)
    a = checkpointer(training, tmp_path / "a")
    b = checkpointer(training, tmp_path / "b", every=3, mode=mode)
    training.steps(1)
    a.save()
    training.steps(2)
    with faults.inject("checkpoint.copy", "sleep:0.1", at=None):
        training.step()
        expected = training.state()
        a.restore(1)
    b.wait()
    b.restore(3)
    assert same(training.state(), expected)
    b.close()
    a.close()
    training.close()


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
def test_a_restore_waits_for_whoever_holds_the_weights(tmp_path: Path, engine: str) -> None:
    training = Training(tmp_path, engine=engine)
    with checkpointer(training, tmp_path / "ckpts") as c:
        training.steps(1)
        c.save()
        seen: list[bool] = []

        def updated(event: TensorUpdated) -> None:
            then = {t.name: t.tensor.detach().clone() for t in event.tensors}

            def finish() -> None:
                seen.append(all(torch.equal(then[t.name], t.tensor) for t in event.tensors))
                hold.release()

            hold = event.hold("somebody", assist=finish)

        subscription = training.run.events.subscribe(TensorUpdated, updated)
        training.steps(2)
        subscription.cancel()
        held = len(seen)
        c.restore(1)
        assert len(seen) > held
        assert all(seen)
    training.close()
