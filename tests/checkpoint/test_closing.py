"""Ends in any order, and captures that fail: nothing is stuck, nothing false is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sapwood
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.errors import CheckpointError, SubscriberError
from sapwood.testing import faults
from tests.checkpoint.engines import see_end
from tests.checkpoint.training import Training, same

ENGINES = ["sync", "node"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_may_be_closed_first(tmp_path: Path, engine: str) -> None:
    training = Training(tmp_path)
    c = sapwood.Checkpointer(training.run, tmp_path / "ckpts", every=1, mode="lazy", engine=engine)
    training.steps(3)
    kept = training.state()
    training.close()
    c.wait()
    c.close()
    c.close()
    again = Training(tmp_path)
    with sapwood.Checkpointer(again.run, tmp_path / "ckpts", engine=engine) as c:
        loaded = c.restore_latest()
        assert loaded is not None
        assert loaded.id.step == 3
    assert same(again.state(), kept)
    again.close()


SCRIPT = """
import sys
from pathlib import Path
import sapwood
from tests.checkpoint.training import Training

folder = Path(sys.argv[1])
training = Training(folder)
c = sapwood.Checkpointer(training.run, folder / "ckpts", every=1, mode="lazy", engine=sys.argv[2])
training.steps(3)
print(getattr(c._engine, "pid", 0), flush=True)
if sys.argv[3] == "raise":
    raise RuntimeError("as it happens")
"""


@pytest.mark.parametrize(
    ("engine", "end"), [("sync", "leave"), ("node", "leave"), ("node", "raise")]
)
def test_a_script_that_just_ends_loses_nothing(tmp_path: Path, engine: str, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), engine, end],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == (end == "raise"), done.stderr
    pid = int(done.stdout)
    if pid:
        see_end(pid, timeout=5)
    again = Training(tmp_path)
    with sapwood.Checkpointer(again.run, tmp_path / "ckpts", engine="sync") as c:
        assert c.restore(3).id.step == 3
    again.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("mode", ["single", "sharded", "backward", "lazy"])
def test_a_copy_that_fails_is_told_and_nothing_false_is_saved(
    tmp_path: Path, mode: str, at: int, engine: str
) -> None:
    if (mode, at) in {("single", 3), ("sharded", 3)}:
        at = 2  # they copy only twice
    plain = Training(tmp_path / "plain")
    losses = plain.steps(12)
    plain.close()
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run,
        tmp_path / "ckpts",
        every=1,
        mode=mode,
        engine=engine,
        keep=None,
        max_failures=1,
    ) as c:
        got = training.steps(2)
        c.wait()
        with (
            faults.inject("checkpoint.copy", "raise", at=at) as fault,
            pytest.raises(SubscriberError, match=r"step \d is not saved.*injected") as found,
        ):
            training.steps(6)
        assert fault.seen >= at
        assert isinstance(found.value.__cause__, CheckpointError)
        raised_at = training.run.step_count
        assert raised_at in (3, 4)
        # It is told once, no arena is lost, and every later step is saved again.
        assert training.steps(12) == losses[raised_at:]
        c.wait()
        saved = {s.id.step for s in c.stats.saves if s.durable.keys() == {"memory", "external"}}
        assert len(saved) == 11
        assert set(range(1, 13)) - saved <= {raised_at, raised_at - 1}
        c.restore(12)
        kept = training.state()
    training.close()
    assert got == losses[:2]
    again = Training(tmp_path)
    with sapwood.Checkpointer(again.run, tmp_path / "ckpts", engine="sync") as c:
        c.restore(12)
    assert same(again.state(), kept)
    again.close()


def test_save_raises_what_went_wrong(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", engine="sync") as c:
        training.steps(2)
        with (
            faults.inject("checkpoint.copy", "raise"),
            pytest.raises(CheckpointError, match="step 2 is not saved"),
        ):
            c.save()
        for _ in range(3):
            assert c.save().id.step == 2
    training.close()


class Odd:
    """State that no checkpoint can hold."""

    def __init__(self) -> None:
        self.value: object = object()

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.value = state_dict["value"]


def test_state_that_cannot_be_saved_is_told_each_time_and_blocks_nothing(tmp_path: Path) -> None:
    training, odd = Training(tmp_path), Odd()
    with sapwood.Checkpointer(
        training.run,
        tmp_path / "ckpts",
        every=1,
        mode="lazy",
        engine="sync",
        own={"odd": odd},
        max_failures=1,
    ) as c:
        for _ in range(4):
            with pytest.raises(SubscriberError, match="odd"):
                training.step()
        odd.value = 7
        training.step()
        c.wait()
        assert [s.id.step for s in c.stats.saves] == [5]
    training.close()


def test_a_callback_that_raises_is_told_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    def bad(report: object) -> None:
        raise ValueError("in the callback")

    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", engine="sync", on_captured=bad
    ) as c:
        training.step()
        with pytest.raises(ValueError, match="in the callback"):
            c.save()
        assert set(c.stats.saves[0].durable) == {"memory", "external"}
    training.close()


def test_restoring_many_times_uses_up_no_staging_memory(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=2, mode="lazy", patience=20.0
    ) as c:
        assert isinstance(c._engine, NodeEngine)
        training.steps(3)
        for _ in range(4):
            c.restore_latest()
            training.steps(3)
        training.steps(8)
        c.wait()
        assert c.stats.skipped == []
    training.close()


def test_a_plan_that_changes_under_a_capture_does_not_mix_with_it(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with (
        faults.inject("checkpoint.copy", "sleep:0.02", at=None),
        sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", every=1, mode="lazy", keep=None
        ) as c,
    ):
        training.steps(2)
        kept = training.state()
        # Its copies are still under way while the next step is planned anew.
        training.model.head.bias.data = torch.full((4,), 0.5)
        training.step()
        c.wait()
        c.restore(2)
        assert same(training.state(), kept)
    training.close()
