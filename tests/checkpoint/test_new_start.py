"""Starting again while the engine of the last time still waits for ranks that come back."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.checkpoint.engine.base import Job
from sapwood.checkpoint.engine.link import Refused
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.server import Server
from sapwood.checkpoint.nodes import _free_address
from sapwood.testing import ranks, seaweed
from sapwood.testing.ranks import mark
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.spec import TierSpec
from tests.checkpoint import engines
from tests.checkpoint.engines import Rank, armed, pid_of, rank, see_end
from tests.checkpoint.training import Training
from tests.tiers.shards import ATTEMPT, fill, plan


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


def begin(folder: Path) -> None:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", every=1, mode="sharded") as c:
        training.steps(3)
        c.wait()
        mark("saved")
        time.sleep(300)


def begin_anew(folder: Path) -> int:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", every=1, mode="sharded") as c:
        assert c.restore_latest() is None  # also not from memory: it is what was removed
        training.steps(1)
        c.wait()
        assert set(c.stats.saves[0].durable) == {"memory", "external"}
    training.close()
    return training.run.step_count


def test_killed_checkpoints_removed_and_started_again_at_once(tmp_path: Path) -> None:
    names = {"SAPWOOD_NODE": "n0"}
    with ranks.start(begin, 1, tmp_path, env=names) as group:
        group.wait_mark("saved", 0)
        group.kill(0, signal.SIGKILL)
        group.wait(30)
    old = pid_of(engines.address(tmp_path / "ckpts"))
    assert old is not None
    shutil.rmtree(tmp_path / "ckpts")
    assert ranks.spawn(begin_anew, 1, tmp_path, env=names) == [1]
    see_end(old)


def test_what_was_removed_does_not_come_back(place: Path) -> None:
    with armed("engine.put:sleep:2@*[tier=external]"):
        one = Rank(place)
    pid = one.engine.pid
    one.submit(1, one.lend())
    one.vanish()
    shutil.rmtree(place)
    with rank(place, token="another") as two:
        assert two.engine.pid != pid
        assert two.engine.memory().shards() == []
        see_end(pid)
        two.submit(2, two.lend())
        assert two.engine.drain(30)
    assert [s.id.step for s in ExternalTier(place).shards()] == [2]


def test_only_the_token_is_lost_and_what_is_on_its_way_arrives(place: Path) -> None:
    with rank(place) as one:
        one.submit(1, one.lend())
        assert one.engine.drain(30)
    with armed("engine.put:sleep:1@*[tier=external]"):
        one = Rank(place)
    pid = one.engine.pid
    one.submit(2, one.lend())
    one.vanish()
    (token,) = place.glob(".engine-*")
    token.unlink()
    with rank(place, token="another") as two:
        assert two.engine.pid != pid
        see_end(pid)
    assert [s.id.step for s in ExternalTier(place).shards()] == [1, 2]


def test_an_engine_in_use_says_whose_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapwood.checkpoint.engine.reach._REFUSALS", 0.1)
    with rank(place):
        (token,) = place.glob(".engine-*")
        text = token.read_text()
        token.unlink()
        with pytest.raises(Refused, match="serves another training that saves here"):
            Rank(place, token="another")
        token.write_text(text)


# -- tiers that are gone ----------------------------------------------------------------------


def test_an_engine_whose_tier_is_gone_ends_when_it_has_lingered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # no folder can be made there
    one = Rank(tmp_path / "file" / "ckpts", linger=0.2)
    pid = one.engine.pid
    assert pid is not None
    for step in (1, 2, 3, 4):
        one.submit(step, one.lend())
    one.vanish()
    see_end(pid, timeout=5.0)  # with all its tries it would take 25 s


class Stuck(ExternalTier):
    """As a file system that is gone: no call ever returns."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.over = threading.Event()

    def put(self, record: ShardRecord, data: Any) -> None:
        self.over.wait(60)


def test_a_tier_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Stuck(tmp_path)
    pipeline = Pipeline([(TierSpec(kind="external"), tier)], lambda progress: None)
    shards = plan(1)
    job = Job(
        id=CheckpointId(1, ATTEMPT),
        rank=0,
        arena=0,
        plan=shards,
        created=1.0,
        extras={},
        tiers=("external",),
    )
    pipeline.submit(job, fill(shards, 0, 1), lambda: None)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        server = Server(listener, engines.address(tmp_path), "token", linger=0)
        server.pipelines["settings"] = pipeline
        assert not server._done(0.0)
        monkeypatch.setattr("sapwood.checkpoint.engine.server.silence", lambda: 1e9)
        assert server._done(0.0)
    tier.over.set()
    assert pipeline.close(30)


def test_a_rank_that_comes_back_is_served_with_patience_again(tmp_path: Path) -> None:
    pipeline = Pipeline([(TierSpec(kind="external"), ExternalTier(tmp_path))], lambda p: None)
    pipeline.hurry()
    assert pipeline._last_tries.is_set()
    pipeline.hurry(hurried=False)
    assert not pipeline._last_tries.is_set()
    assert pipeline.close(5)


WITH_A_WORKER = """
import os, sys, time
from pathlib import Path
from tests.checkpoint.engines import Rank

one = Rank(Path(sys.argv[1]))
child = os.fork()  # as a DataLoader does: the worker inherits the rank's connection
if child == 0:
    os.close(1)
    time.sleep(300)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_rank_that_died_is_not_taken_for_alive_by_its_workers(place: Path) -> None:
    path = f"{Path(sapwood.__file__).parents[1]}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_WORKER, str(place)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    worker = int(done.stdout)
    try:
        old = pid_of(engines.address(place))
        shutil.rmtree(place)
        with rank(place, token="another") as one:
            assert one.engine.pid != old
            see_end(old)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_ports_are_not_drawn_from_the_training() -> None:
    before = random.getstate()
    assert _free_address("127.0.0.1", "127.0.0.1")
    assert len(seaweed._free_ports(2)) == 2
    assert random.getstate() == before
