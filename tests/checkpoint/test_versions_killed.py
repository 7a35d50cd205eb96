"""Kill -9 of ranks and of engines of a training whose checkpoints are versions."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import sapwood
import sapwood.store
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.faults import env
from sapwood.testing.ranks import rank
from tests.checkpoint.engines import see_end
from tests.checkpoint.killing import LAST, Reference, same
from tests.checkpoint.test_versions import hidden, lineage, records, store
from tests.checkpoint.training import Training

ENV = {"SAPWOOD_NODE": "n0", "SAPWOOD_CHECKPOINT_LINGER": "1"}
WORLD = 2


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return ranks.spawn(Reference, WORLD, tmp_path_factory.mktemp("reference"))


def checkpointer(training: Training, folder: Path, engine: str) -> sapwood.Checkpointer:
    return sapwood.Checkpointer(
        training.run,
        folder / "ckpts",
        tiers=("memory", store(folder)),
        every=2,
        keep=None,
        mode="lazy",
        engine=engine,
        drain_timeout=20.0,
    )


def rank_dies(folder: Path, engine: str, moment: str) -> None:
    """Rank 1 dies when it is to save step 4, or whichever rank makes the version of it."""
    dies = rank() == 1 or moment == "tiers.publish"
    training = Training(folder, timeout=20)
    c = checkpointer(training, folder, engine)
    training.steps(3)
    c.wait()
    if dies:
        faults.arm(moment, lambda **_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        training.steps(5)
        while True:  # it will not be long
            training.step()
            time.sleep(0.01)
    except sapwood.SapwoodError as error:
        c.close()
        training.run.close(error)


def go_on(folder: Path, references: list[Reference], engine: str) -> int:
    training = Training(folder)
    with checkpointer(training, folder, engine) as c:
        loaded = c.restore_latest()
        assert loaded is not None
        reference = references[rank()]
        assert same(training.state(), reference.states[loaded.id.step])
        assert training.steps(LAST) == reference.losses[loaded.id.step :]
        c.wait()
    training.close()
    return loaded.id.step


@pytest.mark.parametrize(
    ("engine", "moment", "expected"),
    [("node", "engine.submit", 2), ("sync", "tiers.publish", 4)],
)
def test_a_rank_is_killed(
    tmp_path: Path, references: list[Reference], engine: str, moment: str, expected: int
) -> None:
    outcomes = ranks.spawn(rank_dies, WORLD, tmp_path, engine, moment, env=ENV, expect_errors=True)
    assert signal.SIGKILL in [outcome.signal for outcome in outcomes]
    assert [record.version for record in records(tmp_path)] == ["step-2"]
    found = ranks.spawn(go_on, WORLD, tmp_path, references, engine, env=ENV)
    assert found == [expected] * WORLD
    run = max(records(tmp_path), key=lambda record: record.created).name
    # What all ranks had brought was made a version, and the next one comes from it.
    log = lineage(tmp_path, f"{run}@step-8")
    assert [name.partition("@")[2] for name in log] == [
        f"step-{step}" for step in range(8, expected - 1, -2)
    ] + (["step-2"] if expected == 4 else [])
    with sapwood.store.open(tmp_path / "models") as repo:
        assert repo.verify().problems == []
        repo.gc(quiet=0.0)
        assert repo.verify().problems == []
    assert hidden(tmp_path) == []


def engine_dies(folder: Path, references: list[Reference], moment: str) -> list[dict[str, str]]:
    """The engine dies at a moment of its second checkpoint; the training goes on."""
    training = Training(folder, timeout=20)
    os.environ |= env(f"{moment}:kill[step=4]")
    c = checkpointer(training, folder, "node")
    del os.environ[faults.ENV]
    assert isinstance(c._engine, NodeEngine)
    pid = c._engine.pid
    losses = training.steps(2)
    c.wait()  # only the second one is to be lost
    losses += training.steps(5)
    see_end(pid)
    losses += training.steps(LAST)
    assert losses == references[rank()].losses
    c.wait()
    failed = [dict(save.failed) for save in c.stats.saves]
    c.close()
    training.close()
    return failed


@pytest.mark.parametrize("moment", ["tiers.stage", "tiers.publish"])
def test_the_engine_is_killed(tmp_path: Path, references: list[Reference], moment: str) -> None:
    for failed in ranks.spawn(engine_dies, WORLD, tmp_path, references, moment, env=ENV):
        assert [bool(each) for each in failed][0::3] == [False, False]
    versions = [record.version for record in sorted(records(tmp_path), key=lambda r: r.created)]
    assert versions[0] == "step-2"
    assert versions[-1] == "step-8"
    assert ("step-4" in versions) == (moment == "tiers.publish")
    assert ranks.spawn(go_on, WORLD, tmp_path, references, "sync", env=ENV) == [LAST] * WORLD
