"""A neighbour that dies, stops or leaves: a clear error on all others, in time."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.sync.averaging import node
from sapwood.sync.averaging.slices import add_up
from sapwood.testing import faults, ranks
from sapwood.testing import machines as testing_machines
from sapwood.testing.ranks import rank
from tests.sync import models

needs_machines = pytest.mark.skipif(
    testing_machines.missing() is not None,
    reason=f"no machines here: {testing_machines.missing()}",
)
SGD = {"lr": 0.1, "momentum": 0.9}
TINY = {"first_bucket_mb": 1e-4, "bucket_mb": 1e-4}
FOREVER = 100_000
LONG = 300.0


def train(steps: int, timeout: float, fork_on: int | None = None) -> str:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    try:
        with sapwood.Run(model, optimizer, averaging="node", timeout=timeout, **TINY) as run:
            if rank() == fork_on and os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            for step in range(steps):
                models.train_run_step(run, step)
                if step == 2:
                    ranks.mark("training")
    except sapwood.errors.PeerFailed as error:
        return str(error)
    return ""


def all_train(group: ranks.Group) -> None:
    for number in range(group.world):
        group.wait_mark("training", number, 60)


@pytest.mark.parametrize(
    "point",
    ["sync.launch:kill@20[rank=1]", "sync.update:kill@20[rank=1]", "run.step:kill@5[rank=1]"],
)
def test_a_killed_rank_is_told_long_before_the_timeout(point: str) -> None:
    outcomes = ranks.spawn(train, 3, FOREVER, LONG, env=faults.env(point), expect_errors=True)
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.describe()
        assert "rank" in outcome.value
        assert "died or was killed" in outcome.value


@needs_machines
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_of_several_machines(victim: int) -> None:
    with ranks.start(train, 3, FOREVER, LONG, machines=[2, 1]) as group:
        all_train(group)
        group.kill(victim)
        others = [n for n in range(3) if n != victim]
        for outcome in group.wait(60, ranks=others):
            assert outcome.ok, outcome.describe()
            assert "rank" in outcome.value


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    with ranks.start(train, 2, FOREVER, LONG, fork_on=1) as group:
        all_train(group)
        group.kill(1)
        (outcome,) = group.wait(60, ranks=[0])
        assert outcome.ok, outcome.describe()
        assert "died or was killed" in outcome.value


def test_a_stopped_rank_is_named_by_all_others() -> None:
    with ranks.start(train, 3, FOREVER, 4.0) as group:
        all_train(group)
        group.kill(2, signal.SIGSTOP)
        try:
            outcomes = group.wait(60, ranks=[0, 1])
        finally:
            group.kill(2, signal.SIGCONT)
        for outcome in outcomes:
            assert outcome.ok, outcome.describe()
            assert "not answered for 4 s" in outcome.value
            assert "from rank 2" in outcome.value


def leave_early() -> str:
    return train(3 if rank() == 1 else 6, LONG)


def test_a_rank_that_leaves_early_is_named() -> None:
    first, second, third = ranks.spawn(leave_early, 3)
    assert second == ""
    for told in (first, third):
        assert "rank 1 left the run after 3 steps" in told


def fail_to_sum() -> tuple[str, str]:
    """Rank 1's own summing fails in the third step."""
    calls = 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(12, "Cannot allocate memory")
        add_up(*args)

    if rank() == 1:
        node.add_up = failing
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    try:
        with sapwood.Run(model, optimizer, averaging="node", timeout=LONG, **TINY) as run:
            for step in range(FOREVER):
                models.train_run_step(run, step)
    except (OSError, sapwood.errors.PeerFailed) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_in_summing_is_the_own_ranks_and_told_to_the_others() -> None:
    first, second, third = ranks.spawn(fail_to_sum, 3)
    assert second == ("OSError", "[Errno 12] Cannot allocate memory")
    for kind, told in (first, third):
        assert kind == "PeerFailed"
        assert "rank 1 failed: OSError: [Errno 12] Cannot allocate memory" in told


def four_runs() -> list[tuple[int, list[str]]]:
    """Shared memory, doorbells and threads after each of four Runs in one process."""
    found = []
    for _ in range(4):
        assert train(2, LONG) == ""
        gc.collect()  # a Run is part of a circle, and its gradients with it
        held = []
        for one in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                held.append(str(one.readlink()))
        memory = sum("memfd:sapwood" in one or "eventfd" in one for one in held)
        names = [t.name for t in threading.enumerate() if t.name.startswith("sapwood")]
        found.append((memory, names))
    return found


def test_runs_leave_no_descriptor_and_no_thread() -> None:
    for found in ranks.spawn(four_runs, 2):
        assert found[1:] == [(found[0][0], [])] * 3
