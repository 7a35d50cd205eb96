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
from torch import nn

import sapwood
from sapwood.sync.averaging import node
from sapwood.sync.averaging.slices import add_up
from sapwood.testing import faults, ranks
from sapwood.testing.ranks import rank
from tests.marks import needs_machines
from tests.sync import models

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


def held() -> tuple[int, int, list[str]]:
    """Shared memory and doorbells held by descriptor, memory mapped, and threads."""
    files = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            files.append(str(one.readlink()))
    memory = sum("memfd:sapwood" in one or "eventfd" in one for one in files)
    mapped = Path("/proc/self/maps").read_text().count("memfd:sapwood")
    threads = [t.name for t in threading.enumerate() if t.name.startswith("sapwood")]
    return memory, mapped, threads


def hold_and_let_go() -> None:
    """What is held before a Run is held after it, without waiting for the garbage collector."""
    # Three parts, and which of them is used changes: so do the plans.
    parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    settings = {"averaging": "node", "timeout": LONG, "replan_after": 1, **TINY}
    before = held()
    gc.disable()
    for last in ("stepped", "with gradients", "in use"):
        run = sapwood.Run(parts, optimizer, **settings)
        for step in range(6):
            used = [parts[0], parts[1 + step // 3]]
            loss = sum(part(torch.ones(1, 8)).sum() for part in used)
            loss.backward()
            run.step()
        assert run.stats.plans > 1
        assert held()[0] > before[0]
        kept = None
        if last != "stepped":
            parts[0](torch.ones(1, 8)).sum().backward()
            run.wait()
        if last == "in use":
            kept = parts[0].weight.grad
            seen = kept.tolist()
        names = run.buckets
        run.close()
        assert run.buckets == names
        if kept is None:
            assert held() == before, (last, held(), before)
        else:
            assert kept.tolist() == seen
            assert held()[1] > before[1]  # one part of it is, so all of it is
            # What another backward adds to is no other rank's.
            assert parts[0].weight.grad is not kept
            assert parts[0].weight.grad.tolist() == seen
            parts[0](torch.ones(1, 8)).sum().backward()
            assert kept.tolist() == seen
            del kept
            assert held() == before
        optimizer.zero_grad()
    gc.enable()


def test_a_closed_run_holds_nothing() -> None:
    ranks.spawn(hold_and_let_go, 2)
