"""One rank: whatever way bytes are captured, the step comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sapwood
from sapwood.errors import CheckpointError
from tests.checkpoint.training import Training, same

STEPS = 8
MODES = ("single", "sharded", "backward", "lazy", "auto")


def reference(folder: Path, kind: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """An undisturbed run: the loss of each step and the state after it."""
    training = Training(folder / "reference", kind)
    losses, states = [], []
    for _ in range(STEPS):
        losses.append(training.step())
        states.append(training.state())
    training.close()
    return losses, states


@pytest.mark.parametrize(
    ("mode", "kind", "engine"),
    [
        *((mode, kind, "sync") for mode in MODES for kind in ("sgd", "adamw")),
        *((mode, "adamw", "node") for mode in MODES),
    ],
)
def test_every_step_comes_back_bit_for_bit(
    tmp_path: Path, mode: str, kind: str, engine: str
) -> None:
    losses, states = reference(tmp_path, kind)
    saved = Training(tmp_path, kind)
    place = tmp_path / "ckpts"
    with sapwood.Checkpointer(saved.run, place, every=1, mode=mode, engine=engine, keep=None) as c:
        assert saved.steps(STEPS) == losses
        c.wait()
        assert [s.id.step for s in c.stats.saves] == list(range(1, STEPS + 1))
        assert c.stats.skipped == []
    assert same(saved.state(), states[-1])
    saved.close()
    for step in range(1, STEPS + 1):
        again = Training(tmp_path / "again", kind)
        torch.manual_seed(9)  # whatever it was, it must come back
        with sapwood.Checkpointer(again.run, place, engine="sync") as c:
            assert c.restore(step).id.step == step
        assert same(again.state(), states[step - 1])
        assert again.run.step_count == step
        assert again.steps(STEPS) == losses[step:]
        assert same(again.state(), states[-1])
        again.close()


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_the_newest_is_restored_and_nothing_is_overwritten(tmp_path: Path, engine: str) -> None:
    place = tmp_path / "ckpts"
    for expected in (None, 4, 8):
        training = Training(tmp_path)
        with sapwood.Checkpointer(
            training.run, place, every=2, mode="lazy", engine=engine, keep=None
        ) as c:
            loaded = c.restore_latest()
            assert (None if loaded is None else loaded.id.step) == expected
            training.steps(training.run.step_count + 4)
        training.close()
    assert sorted(int(p.name.split("-")[0]) for p in place.iterdir()) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_save_by_hand(tmp_path: Path, engine: str) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", engine=engine) as c:
        training.steps(3)
        report = c.save()
        assert report.id.step == 3
        kept = training.state()
        training.steps(5)
        assert c.restore_latest() is not None
        assert same(training.state(), kept)
    training.close()


def test_weights_alone(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=2, mode="lazy", engine="sync"
    ) as c:
        training.steps(2)
        kept = training.state()
        training.steps(3)
        later = training.state()
        c.restore(2, optimizer=False)
        after = training.state()
    training.close()
    names = [n for n in kept if "/" not in n and n not in ("random", "lr")]
    assert all(torch.equal(after[n], kept[n]) for n in names)
    states = [n for n in kept if n.endswith("/exp_avg")]
    assert states
    assert all(torch.equal(after[n], later[n]) for n in states)


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=1, mode="lazy", engine="sync"
    ):
        training.step()
    training.close()
    other = Training(tmp_path)
    before = other.state()
    other.model.head = nn.Linear(64, 5)
    other.model.more = nn.Linear(2, 2)
    del other.model.wide
    with (
        sapwood.Checkpointer(other.run, tmp_path / "ckpts", engine="sync") as c,
        pytest.raises(CheckpointError, match="of another model") as found,
    ):
        c.restore_latest()
    text = str(found.value)
    for line in (
        "head.weight: F32 [4, 64] in the checkpoint, F32 [5, 64] here",
        "head.bias: F32 [4] in the checkpoint, F32 [5] here",
        "wide.weight: only in the checkpoint",
        "more.weight: missing in the checkpoint",
    ):
        assert line in text
    assert torch.equal(before["conv.weight"], other.model.conv.weight)
    other.close()


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_tensors_that_are_replaced_are_not_saved_stale(tmp_path: Path, engine: str) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=1, mode="lazy", engine=engine
    ) as c:
        training.steps(2)
        training.model.head.weight.data = torch.full((4, 64), 0.25)
        training.model.norm.running_mean = torch.full((8,), 3.0)
        training.steps(3)
        kept = training.state()
        training.steps(4)
        c.restore(3)
        assert same(training.state(), kept)
    training.close()


def test_saving_by_hand_between_steps_that_are_due(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run,
        tmp_path / "ckpts",
        every=2,
        mode="lazy",
        keep=None,
        engine="sync",
        drain_timeout=20.0,
    ) as c:
        for step in range(1, 7):
            training.step()
            assert c.save().id.step == step  # of steps that were due, too
        c.wait()
        assert sorted(s.id.step for s in c.stats.saves) == [1, 2, 3, 4, 5, 6]
        assert c.stats.skipped == []
    training.close()


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_saved_when_every_parameter_is_trained(tmp_path: Path, mode: str) -> None:
    training = Training(tmp_path, frozen=False)
    place = tmp_path / "ckpts"
    with sapwood.Checkpointer(training.run, place, every=3, mode=mode, engine="sync") as c:
        training.steps(3)
        kept = training.state()
        training.steps(5)
        c.restore(3)
        assert same(training.state(), kept)
    training.close()


def test_metrics_that_come_too_late_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", every=2, engine="sync") as c:
        training.steps(1)
        c.save(metrics={"loss": 1.0, "nan": float("nan")})
        assert "came too late" not in caplog.text
        training.steps(2)
        assert c.save(metrics={"loss": 0.5, "nan": float("nan")}).metrics["loss"] == 1.0
        assert "{'loss': 0.5} came too late" in caplog.text
    training.close()
