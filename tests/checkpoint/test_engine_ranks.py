"""Whole trainings with an engine per node: every rank dies, the engine dies, and all goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.testing import faults, ranks
from sapwood.testing.ranks import mark, rank
from tests.checkpoint.engines import address, pid_of, see_end
from tests.checkpoint.training import Training, same

STEPS = 6
State = dict[str, torch.Tensor]


def node_names(count: int) -> Any:
    """Ranks in turn on ``count`` nodes, all of them on this host."""
    return lambda number: {"SAPWOOD_NODE": f"n{number % count}"}


def pid(checkpointer: sapwood.Checkpointer) -> int:
    engine = checkpointer._engine
    assert isinstance(engine, NodeEngine)
    assert engine.pid is not None
    return engine.pid


def checkpointer(training: Training, folder: Path, **options: Any) -> sapwood.Checkpointer:
    return sapwood.Checkpointer(training.run, folder / "ckpts", **{"keep": None, **options})


def undisturbed(folder: Path) -> tuple[list[float], State]:
    training = Training(folder)
    losses = training.steps(STEPS)
    state = training.state()
    training.close()
    return losses, state


def die_after(folder: Path, step: int, mode: str) -> None:
    training = Training(folder)
    c = checkpointer(training, folder, every=1, mode=mode, on_captured=lambda r: said(r, step))
    mark(f"engine {pid(c)}")
    while True:
        training.step()
        if training.run.step_count == step:
            c._saver.drain(30)  # its bytes are taken, nothing says that they are written
            torch.save(training.state(), folder / f"died-{rank()}.pt")
            mark("captured")
            time.sleep(300)


def said(report: Any, step: int) -> None:
    if report.id.step == step:
        mark("submitted")


def go_on(folder: Path) -> tuple[int, tuple[str, ...], State, list[float], State]:
    training = Training(folder)
    torch.manual_seed(5)
    with checkpointer(training, folder) as c:
        loaded = c.restore_latest()
        assert loaded is not None
    restored = training.state()
    losses = training.steps(STEPS)
    end = training.state()
    training.close()
    return loaded.id.step, loaded.tiers, restored, losses, end


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mode", ["lazy", "backward"])
def test_all_ranks_are_killed_and_the_very_step_comes_back(
    tmp_path: Path, mode: str, nodes: int
) -> None:
    expected = ranks.spawn(undisturbed, 2, tmp_path / "reference")
    # Every write takes its time, so that the ranks are surely dead before theirs are done.
    slow = faults.env("engine.put:sleep:0.4@*[tier=external]")
    names = node_names(nodes)
    with ranks.start(
        die_after, 2, tmp_path, 3, mode, env=lambda number: {**slow, **names(number)}
    ) as group:
        for number in (0, 1):
            group.wait_mark("submitted", number)
            group.wait_mark("captured", number)
        for number in (0, 1):
            group.kill(number, signal.SIGKILL)
        group.wait(30)
    engines = {pid_of(address(tmp_path / "ckpts", f"n{n}")) for n in range(nodes)}
    assert None not in engines
    for number, (step, tiers, restored, losses, end) in enumerate(
        ranks.spawn(go_on, 2, tmp_path, env=names)
    ):
        assert step == 3
        # A rank reads a shared disk rather than have another node's memory sent to it.
        assert {"memory"} <= set(tiers) <= ({"memory"} if nodes == 1 else {"memory", "external"})
        assert same(restored, torch.load(tmp_path / f"died-{number}.pt"))
        assert losses == expected[number][0][3:]
        assert same(end, expected[number][1])
    for one in engines:
        see_end(one, timeout=5)


def survive(folder: Path, sig: int) -> tuple[list[float], State, Any]:
    training = Training(folder)
    # A dead engine is replaced however long that takes here; one that is stopped is not waited for.
    patience = 0.2 if sig == signal.SIGSTOP else 30.0
    with checkpointer(training, folder, every=1, mode="lazy", patience=patience) as c:
        first = pid(c)
        losses = training.steps(2)
        if rank() == 0:
            os.kill(first, sig)
        losses += training.steps(4)
        if sig == signal.SIGSTOP and rank() == 0:
            os.kill(first, signal.SIGCONT)
        c.wait(30)
        losses += training.steps(STEPS)
        c.wait(30)
        last = c.stats.saves[-1]
        found = (first, pid(c), set(last.durable), last.id.step, list(c.stats.skipped))
    state = training.state()
    training.close()
    return losses, state, found


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_training_survives_its_engine(tmp_path: Path, sig: signal.Signals) -> None:
    expected = ranks.spawn(undisturbed, 2, tmp_path / "reference")
    results = ranks.spawn(survive, 2, tmp_path, sig)
    for (losses, state), (got, end, found) in zip(expected, results, strict=True):
        assert got == losses
        assert same(end, state)
        first, second, durable, step, skipped = found
        assert (first == second) == (sig == signal.SIGSTOP)
        assert durable == {"memory", "external"}
        assert step == STEPS
        assert sig == signal.SIGSTOP or skipped == []
        see_end(second)


def fail_at(folder: Path, step: int, first: str) -> str:
    training = Training(folder, timeout=20)
    c = checkpointer(training, folder, every=1, mode="lazy")
    try:
        while True:
            if training.run.step_count == step and rank() == 1:
                os._exit(3)
            training.step()
    except sapwood.SapwoodError as error:
        failure = error
    if first == "checkpointer":
        c.close()
    training.run.close(failure)
    c.close()
    return type(failure).__name__


@pytest.mark.parametrize("first", ["run", "checkpointer"])
def test_a_failed_group_closes_and_keeps_its_checkpoints(tmp_path: Path, first: str) -> None:
    env = {"SAPWOOD_CHECKPOINT_LINGER": "0.2"}
    outcomes = ranks.spawn(fail_at, 2, tmp_path, 3, first, env=env, expect_errors=True)
    assert outcomes[0].value == "PeerFailed"
    assert outcomes[1].exit_code == 3
    step, *_ = ranks.spawn(go_on, 2, tmp_path, env=env)[0]
    # Rank 1 left before its last copy was surely taken.
    assert step in (2, 3)


def never_close(folder: Path) -> int:
    training = Training(folder)
    c = checkpointer(training, folder, every=1, mode="sharded")
    training.steps(3)
    return pid(c)  # and the process ends without a word, not even at exit


def test_a_process_that_never_closes_loses_nothing(tmp_path: Path) -> None:
    env = {"SAPWOOD_CHECKPOINT_LINGER": "0.2"}
    engine = ranks.spawn(never_close, 2, tmp_path, env=env)[0]
    see_end(engine)
    assert [step for step, *_ in ranks.spawn(go_on, 2, tmp_path)] == [3, 3]
