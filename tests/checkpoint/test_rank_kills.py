"""Kill -9 of one rank, of all, and of all with their engine: the newest whole state comes back."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import sapwood
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.checkpoint.report import SaveReport
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.faults import env
from sapwood.testing.ranks import mark, rank
from tests.checkpoint.engines import see_end
from tests.checkpoint.killing import (
    FIRST,
    SECOND,
    Reference,
    checkpointer,
    goes_on,
)
from tests.checkpoint.training import Training

ENV = {"SAPWOOD_NODE": "n0", "SAPWOOD_CHECKPOINT_LINGER": "5"}
WORLD = 2
ALL = (0, 1)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return ranks.spawn(Reference, WORLD, tmp_path_factory.mktemp("reference"))


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder: Path, moment: str, victims: tuple[int, ...], mode: str) -> str:
    """Two saves; in the second, the victims die at the moment."""
    mine = rank() in victims

    def captured(report: SaveReport) -> None:
        if mine and (moment, report.id.step) == ("submitted", SECOND):
            die()

    def durable(report: SaveReport, tier: str) -> None:
        if mine and (moment, report.id.step, tier) == ("durable", SECOND, "local"):
            die()

    training = Training(folder, timeout=20)
    c = checkpointer(training, folder, mode=mode, on_captured=captured, on_durable=durable)
    training.steps(SECOND - 1)
    c.wait()
    if mine and moment == "capture":
        faults.arm("checkpoint.copy", die, at=2)
    if mine and moment == "submit":
        faults.arm("engine.submit", die)
    try:
        training.steps(SECOND + 1)
        if mine:
            time.sleep(60)  # it will not be that long
        training.step()
    except sapwood.SapwoodError as error:
        c.close()
        training.run.close(error)
        return type(error).__name__
    return "not disturbed at all"


def go_on(folder: Path, references: list[Reference]) -> tuple[int, tuple[str, ...]]:
    return goes_on(folder, references[rank()])


@pytest.mark.parametrize(
    ("moment", "victims", "mode", "expected"),
    [
        ("capture", (1,), "backward", FIRST),
        ("capture", ALL, "lazy", FIRST),
        ("submit", (1,), "lazy", FIRST),
        ("submit", ALL, "backward", FIRST),
        ("submitted", (1,), "backward", SECOND),
        ("submitted", ALL, "lazy", SECOND),
        ("durable", (0,), "lazy", SECOND),
    ],
)
def test_ranks_are_killed(
    tmp_path: Path,
    references: list[Reference],
    moment: str,
    victims: tuple[int, ...],
    mode: str,
    expected: int,
) -> None:
    outcomes = ranks.spawn(
        train_and_die, WORLD, tmp_path, moment, victims, mode, env=ENV, expect_errors=True
    )
    for number, outcome in enumerate(outcomes):
        if number in victims:
            assert outcome.signal == signal.SIGKILL
        else:
            assert outcome.value == "PeerFailed"
    found = ranks.spawn(go_on, WORLD, tmp_path, references, env=ENV)
    assert [step for step, _ in found] == [expected] * WORLD


# -- all memory is lost ------------------------------------------------------------------------


def capture_and_wait(folder: Path) -> None:
    training = Training(folder)
    c = checkpointer(training, folder)
    assert isinstance(c._engine, NodeEngine)
    (folder / f"engine-{rank()}").write_text(str(c._engine.pid))
    training.steps(SECOND - 1)
    c.wait()
    training.steps(SECOND)
    c._saver.drain(30)
    mark("captured")
    time.sleep(300)


@pytest.mark.parametrize(
    ("tier", "put", "expected", "said"),
    [
        ("local", 1, FIRST, None),
        ("local", 2, FIRST, r"no tier has the shards of ranks \[[01]\]"),
        ("external", 2, SECOND, None),
    ],
)
def test_ranks_and_engine_are_killed_so_that_only_disks_remain(
    tmp_path: Path,
    references: list[Reference],
    tier: str,
    put: int,
    expected: int,
    said: str | None,
) -> None:
    """The engine dies just before it puts the first or second shard of a step into a tier."""
    armed = env(f"engine.put:kill@{put}[tier={tier},step={SECOND}]")
    with ranks.start(capture_and_wait, WORLD, tmp_path, env={**ENV, **armed}) as group:
        for number in ALL:
            group.wait_mark("captured", number)
        see_end(int((tmp_path / "engine-0").read_text()))
        for number in ALL:
            group.kill(number, signal.SIGKILL)
        group.wait(30)
    for step, skipped in ranks.spawn(go_on, WORLD, tmp_path, references, env=ENV):
        assert step == expected
        if said is None:
            assert skipped == ()
        else:
            (note,) = skipped
            assert note.startswith(f"{SECOND:08d}-")
            assert re.search(said, note)
