"""Ranks compare their replicas before a checkpoint leaves them; what mixes two is not saved."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sapwood
from sapwood.checkpoint import replicas, witness
from sapwood.errors import ReplicasDiffer
from sapwood.events import StepEnded
from sapwood.testing import ranks
from sapwood.testing.ranks import mark, rank
from sapwood.tiers import digest
from tests.checkpoint.training import TINY, Training

ENV = {"SAPWOOD_CHECKPOINT_LINGER": "0.2"}


def edit_weight(training: Training) -> None:
    training.model.frozen.weight.data[3, 2] += 1.0


def edit_state(training: Training) -> None:
    training.optimizer.state[training.model.wide.weight]["exp_avg"].view(-1)[5] += 1.0


def edit_buffer(training: Training) -> None:
    training.model.norm.running_mean[1] += 1.0


def edit_nan(training: Training) -> None:
    training.model.frozen.bias.data[0] = float("nan")


EDITS: dict[str, Callable[[Training], None]] = {
    "model frozen.weight": edit_weight,
    "optimizer wide.weight/exp_avg": edit_state,
    "model norm.running_mean": edit_buffer,
    "model frozen.bias": edit_nan,
}


def told_of(error: BaseException | None) -> ReplicasDiffer | None:
    while error is not None and not isinstance(error, ReplicasDiffer):
        error = error.__cause__
    return error


def folders(folder: Path) -> list[int]:
    return sorted(int(p.name[:8]) for p in (folder / "ckpts").glob("00*") if not p.suffix)


def diverge(
    folder: Path, mode: str, who: int, what: str, options: dict[str, Any]
) -> tuple[str, str, list[Any], float]:
    """Step 2 is saved, then one rank's replica is changed: in one of the next checkpoints, until
    each rank has looked at every other, it is found.
    """
    training = Training(folder, timeout=20)
    every = None if what.endswith("running_mean") else 2
    c = sapwood.Checkpointer(
        training.run, folder / "ckpts", every=every, mode=mode, engine="sync", **options
    )
    text = kind = ""
    error: BaseException | None = None
    try:
        training.steps(2)
        c.save() if every is None else c.wait()
        if every is not None and rank() == who:
            EDITS[what](training)
        training.steps(2 * training.run.group.world)
        if every is None:
            if rank() == who:
                EDITS[what](training)
            c.save()
        c.wait()
    except sapwood.SapwoodError as caught:
        error = caught
        kind, text = type(told_of(error)).__name__, str(error)
    differences = [(d.step, d.ranks, f"{d.file} {d.name}") for d in c.stats.differences]
    start = time.monotonic()
    c.close()
    seconds = time.monotonic() - start
    training.run.close(error)
    return kind, text, differences, seconds


@pytest.mark.parametrize(
    ("mode", "world", "who", "what"),
    [
        ("sharded", 2, 0, "model frozen.weight"),
        ("sharded", 3, 1, "model frozen.bias"),
        ("lazy", 2, 1, "model frozen.weight"),
        ("lazy", 3, 2, "optimizer wide.weight/exp_avg"),
        ("backward", 2, 0, "optimizer wide.weight/exp_avg"),
        ("single", 3, 0, "model frozen.weight"),
        ("single", 2, 1, "optimizer wide.weight/exp_avg"),
        ("lazy", 2, 1, "model norm.running_mean"),
    ],
)
def test_a_replica_that_differs_is_named_and_not_saved(
    tmp_path: Path, mode: str, world: int, who: int, what: str
) -> None:
    found = ranks.spawn(diverge, world, tmp_path, mode, who, what, {"keep": 1}, env=ENV)
    step = found[0][2][0][0]
    for kind, text, differences, _ in found:
        assert kind == "ReplicasDiffer", text
        assert f"step {step} is not saved: ranks that must have equal tensors do not" in text
        assert what in text
        assert differences == found[0][2]
        assert all(who in pair for _, pair, _ in differences)
        assert (step, what) in [(step, name) for step, _, name in differences]
    assert folders(tmp_path) == [step - 2]
    restored = ranks.spawn(go_back, world, tmp_path, env=ENV)
    assert restored == [step - 2] * world


def go_back(folder: Path) -> int:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", engine="sync") as c:
        about = c.restore_latest()
        training.step()
        c.save()
    training.close()
    assert about is not None
    return about.step


def train_freely(folder: Path) -> tuple[int, str]:
    """Nobody waits for the comparison; rank 1 does not save what it changes."""
    training = Training(folder, timeout=20)
    c = sapwood.Checkpointer(
        training.run, folder / "ckpts", every=2, mode="lazy", engine="sync", keep=1
    )
    training.steps(2)
    c.wait()
    if rank() == 1:
        edit_weight(training)
    error: BaseException | None = None
    try:
        training.steps(40)
    except sapwood.SapwoodError as caught:
        error = caught
    step = training.run.step_count
    c.close()
    training.run.close(error)
    return c.stats.differences[0].step, f"{step} {type(told_of(error)).__name__}"


def test_all_ranks_stop_at_the_same_step_and_save_nothing_until_then(tmp_path: Path) -> None:
    found = ranks.spawn(train_freely, 3, tmp_path, env=ENV)
    assert len(set(found)) == 1
    assert found[0][1].endswith("ReplicasDiffer")
    assert folders(tmp_path) == [found[0][0] - 2]


# -- what is no difference -------------------------------------------------------------------


class Odd(nn.Module):
    """Tied weights, a frozen layer, BatchNorm, bf16, an empty parameter and an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.small = nn.Linear(8, 8).to(torch.bfloat16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("nan", torch.full((3,), float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += float(x.sum())
        y = self.frozen(self.tied(self.norm(self.first(x))))
        found: Tensor = self.small(y.to(torch.bfloat16)).float()
        return found


def train_oddly(
    folder: Path, mode: str, optimizer: str, shares: bool, engine: str = "layerwise"
) -> list[Any]:
    torch.manual_seed(rank())
    model = Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(trained, lr=1e-2),
        "sgd": lambda: torch.optim.SGD(trained, lr=1e-2, momentum=0.9),
    }
    run = sapwood.Run(
        model,
        made[optimizer](),
        folder=folder / "runs",
        broadcast_buffers=shares,
        engine=engine,
        **TINY,
    )
    with sapwood.Checkpointer(run, folder / "ckpts", every=1, mode=mode, engine="sync") as c:
        c.save()  # before the first step
        for step in range(5):
            for part in range(2):
                torch.manual_seed(100 * step + 10 * part + rank())
                with run.accumulate(active=part == 0):
                    run.model(torch.randn(4, 8)).pow(2).mean().backward()
            run.step()
        c.save()
        c.wait()
        found = [s.compared for s in c.stats.saves]
        assert not c.stats.failures
        assert not c.stats.differences
    run.close()
    return found


@pytest.mark.parametrize(
    ("mode", "optimizer", "shares", "world"),
    [
        ("lazy", "adamw", True, 3),
        ("backward", "sgd", False, 2),
        ("sharded", "adamw", False, 2),
        ("single", "sgd", True, 3),
    ],
)
def test_a_sound_training_is_never_stopped(
    tmp_path: Path, mode: str, optimizer: str, shares: bool, world: int
) -> None:
    engine = "ddp" if mode == "backward" else "layerwise"
    found = ranks.spawn(train_oddly, world, tmp_path, mode, optimizer, shares, engine, env=ENV)
    assert found == [[True] * 6] * world


def train_alone(folder: Path) -> list[Any]:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", every=1, engine="sync") as c:
        training.steps(2)
        c.wait()
        found = [s.compared for s in c.stats.saves]
    training.close()
    return found


def test_one_rank_has_nobody_to_compare_with(tmp_path: Path) -> None:
    assert ranks.spawn(train_alone, 1, tmp_path) == [[None, None]]


# -- settings --------------------------------------------------------------------------------


def test_a_warning_saves_and_keeps_the_last_that_was_equal(tmp_path: Path) -> None:
    options = {"keep": 1, "check_replicas": "warn"}
    args = (tmp_path, "sharded", 1, "model frozen.weight", options)
    for kind, _, differences, _ in ranks.spawn(diverge, 2, *args, env=ENV):
        assert kind == ""
        assert [name for _, _, name in differences] == ["model frozen.weight"]
    assert folders(tmp_path) == [2, 4]


def test_nothing_is_compared_when_rank_0_says_so(tmp_path: Path) -> None:
    args = (tmp_path, "lazy", 1, "model frozen.weight", {"keep": None})
    env = {**ENV, "SAPWOOD_CHECKPOINT_CHECK_REPLICAS": "off"}
    assert [f[:3] for f in ranks.spawn(diverge, 2, *args, env=env)] == [("", "", [])] * 2
    assert folders(tmp_path) == [2, 4]


# -- ranks that are late or gone -------------------------------------------------------------


def lose_rank_1(folder: Path, mode: str, how: int) -> tuple[float, list[Any]]:
    """Rank 1 has ended step 4 and does not come to capture it."""
    replicas._PATIENCE = 0.5
    training = Training(folder, timeout=20)

    def ended(event: StepEnded) -> None:
        if rank() == 1 and event.step == 4:
            mark("lost")
            os.kill(os.getpid(), how)

    training.run.events.subscribe(StepEnded, ended)
    c = sapwood.Checkpointer(training.run, folder / "ckpts", every=2, mode=mode, engine="sync")
    training.steps(3)
    c.wait()
    start = time.monotonic()
    training.step()
    c.wait(15)
    seconds = time.monotonic() - start
    found = [(s.id.step, s.compared) for s in c.stats.saves]
    assert not c.stats.failures
    mark("waited")
    error: sapwood.SapwoodError | None = None
    try:
        training.steps(6)
        c.wait()
        found += [(s.id.step, s.compared) for s in c.stats.saves[-1:]]
    except sapwood.SapwoodError as caught:
        error = caught
    assert told_of(error) is None
    c.close()
    training.run.close(error)
    return seconds, found


@pytest.mark.parametrize("mode", ["lazy", "sharded"])
def test_a_stopped_rank_is_not_waited_for(tmp_path: Path, mode: str) -> None:
    with ranks.start(lose_rank_1, 2, tmp_path, mode, signal.SIGSTOP, env=ENV) as group:
        group.wait_mark("waited", rank=0, timeout=30)
        group.kill(1, signal.SIGCONT)
        seconds, found = group.wait(timeout=30)[0].value
    assert seconds < 5
    assert found == [(2, True), (4, False), (6, True)]


def test_a_killed_rank_is_not_waited_for(tmp_path: Path) -> None:
    with ranks.start(lose_rank_1, 2, tmp_path, "lazy", signal.SIGKILL, env=ENV) as group:
        seconds, found = group.wait(timeout=30)[0].value
    assert seconds < 5
    assert found == [(2, True), (4, False)]


# -- ranks that cannot be compared -----------------------------------------------------------


def digest_otherwise(folder: Path) -> tuple[list[Any], list[str]]:
    if rank() == 1:  # the package is not installed there
        for module in (digest, replicas, witness):
            module.FAST_ALGORITHM = "crc32"  # type: ignore[attr-defined]
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sapwood").addHandler(handler)
    training = Training(folder, timeout=20)
    with sapwood.Checkpointer(training.run, folder / "ckpts", every=1, engine="sync") as c:
        training.steps(3)
        c.wait()
        found = [s.compared for s in c.stats.saves]
    training.close()
    return found, [text for text in said if "cannot be compared" in text]


def test_ranks_with_other_packages_say_that_nothing_is_compared(tmp_path: Path) -> None:
    for found, said in ranks.spawn(digest_otherwise, 2, tmp_path, env=ENV):
        assert found == [False] * 3
        assert len(said) == 1
        assert "xxhash" in said[0]
