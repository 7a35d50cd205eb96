"""State that the loop changes after ``run.step()``, and new rates, in real forks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

import sapwood
from sapwood.clone.extras import CloneExtras, StepExtras
from sapwood.clone.forked import Fork
from sapwood.clone.order import ENV, ForkedFrom
from sapwood.errors import ConfigError
from sapwood.testing import ranks
from tests.clone.forking import MORE, digest, home_of, order

ENOUGH = 3000


class Average:
    """An average of the weights, as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Position:
    """A place in the data, which moves when a batch is fetched."""

    def __init__(self) -> None:
        self.at = 0

    def fetch(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Losses:
    """Something else that changes after a step; nothing about it says so."""

    def __init__(self) -> None:
        self.sum = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torchs.LambdaLR(o, lambda epoch: 1.0 / (1 + epoch % 7)),
    "exponential": lambda o: torchs.ExponentialLR(o, 0.9999),
    "onecycle": lambda o: torchs.OneCycleLR(o, 0.3, total_steps=10 * ENOUGH),
}


class Loop:
    """A training loop with much to do after each step."""

    def __init__(self, folder: Path, kind: str, *, by_hand: bool) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = SCHEDULERS[kind](self.optimizer)
        self.by_hand = by_hand
        self.run = sapwood.Run(
            self.model,
            self.optimizer,
            schedulers=[] if by_hand else [self.scheduler],
            folder=folder / "runs",
        )
        self.average, self.position, self.losses = Average(self.model), Position(), Losses()
        self.seen: dict[int, tuple[Any, ...]] = {}

    def allow_clones(self, **options: Any) -> None:
        shared: dict[str, Any] = {"average": self.average, "losses": self.losses}
        if self.by_hand:
            shared["scheduler"] = self.scheduler
        self.run.allow_clones(shared=shared, own={"position": self.position}, **options)

    def step(self) -> None:
        at, drawn = self.position.fetch(), torch.rand(1).item()
        rate = self.optimizer.param_groups[0]["lr"]
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(at)) + drawn
        loss = self.run.model(x).square().mean()
        loss.backward()
        self.run.step()
        with torch.no_grad():
            self.model(x)  # an evaluation begins no step
        if self.by_hand:
            self.scheduler.step()
        self.average.update(self.model)
        self.losses.sum += loss.item()
        self.seen[self.run.step_count] = (loss.item(), rate, at, drawn, self.kept())

    def kept(self) -> tuple[Any, ...]:
        """What is there between two steps."""
        rate = self.optimizer.param_groups[0]["lr"]
        return (digest(self.average.values), self.position.at, self.losses.sum, rate)


ALL_LATE = ("average", "losses", "scheduler")


def donate(
    folder: Path, kind: str, by_hand: bool, after_step: tuple[str, ...] | None, ends: bool
) -> dict[str, Any]:
    """Train until told to stop; with ``ends``, until just after the step that is forked."""
    loop = Loop(folder, kind, by_hand=by_hand)
    # Who ends after the forked step gives the clone that long to begin.
    loop.allow_clones(after_step=after_step, patience=30.0)
    ranks.mark("open")
    last = ENOUGH
    while loop.run.step_count < last:
        loop.step()
        time.sleep(0.002)
        forks = loop.run.forks
        if ends and forks and forks[-1].step == loop.run.step_count:
            break
        if last == ENOUGH and (folder / "stop").exists():
            last = loop.run.step_count + MORE
    loop.run.close()
    return {"seen": loop.seen, "forks": [(f.done, f.failure) for f in loop.run.forks]}


def receive(
    folder: Path, kind: str, by_hand: bool, after_step: tuple[str, ...] | None
) -> dict[str, Any]:
    loop = Loop(folder, kind, by_hand=by_hand)
    parent = loop.run.forked_from
    assert parent is not None
    loop.allow_clones(after_step=after_step)
    kept = loop.kept()
    for _ in range(MORE):
        loop.step()
    loop.run.close()
    return {"step": parent.step, "kept": kept, "seen": loop.seen}


def fork(
    folder: Path,
    kind: str,
    *,
    by_hand: bool,
    overrides: dict[str, Any] | None = None,
    after_step: tuple[str, ...] | None = None,
    ends: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a donor and its clone have seen."""
    with ranks.start(donate, 1, folder, kind, by_hand, after_step, ends) as group:
        group.wait_mark("open", rank=0, timeout=60)
        env = order(home_of(folder), overrides=overrides or {})
        (clone,) = ranks.spawn(receive, 1, folder / "clone", kind, by_hand, after_step, env=env)
        (folder / "stop").touch()
        (outcome,) = group.wait(timeout=60)
    assert outcome.error is None, outcome.error
    assert outcome.value["forks"] == [(True, "")]
    return outcome.value, clone


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends there"])
def test_a_clone_has_what_the_loop_did_after_the_step(tmp_path: Path, ends: bool) -> None:
    donor, clone = fork(tmp_path, "lambda", by_hand=True, after_step=ALL_LATE, ends=ends)
    step = clone["step"]
    assert clone["kept"] == donor["seen"][step][-1], "what was there between the two steps"
    if ends:
        assert max(donor["seen"]) == step
        return
    for number in range(step + 1, step + MORE + 1):
        assert clone["seen"][number] == donor["seen"][number]


def test_an_average_and_a_scheduler_are_known_without_being_named(tmp_path: Path) -> None:
    donor, clone = fork(tmp_path, "exponential", by_hand=True)
    theirs, ours = donor["seen"][clone["step"]][-1], clone["kept"]
    assert (ours[0], ours[1], ours[3]) == (theirs[0], theirs[1], theirs[3])
    # What nothing is known of is taken when run.step() ends, before the loop went on.
    assert ours[2] == donor["seen"][clone["step"] - 1][-1][2]


@pytest.mark.parametrize(("kind", "by_hand"), [("onecycle", False), ("lambda", True)])
def test_a_new_rate_holds_from_the_first_step_and_the_schedule_goes_on(
    tmp_path: Path, kind: str, by_hand: bool
) -> None:
    overrides = {"optimizer.lr": 0.004}
    donor, clone = fork(tmp_path, kind, by_hand=by_hand, overrides=overrides)
    step = clone["step"]
    theirs = [donor["seen"][n][1] for n in range(step + 1, step + MORE + 1)]
    ours = [clone["seen"][n][1] for n in range(step + 1, step + MORE + 1)]
    assert ours[0] == 0.004
    assert ours == pytest.approx([rate * 0.004 / theirs[0] for rate in theirs], rel=1e-9)
    assert len(set(ours)) > 1


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, folder=tmp_path) as run:
        for wrong in (["ema"], "position"):
            with pytest.raises(ConfigError, match=r"after_step is .*expected names .*position"):
                run.allow_clones(own={"position": Position()}, after_step=wrong)


class Broken(Position):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")


@pytest.mark.parametrize("after_step", [None, (), ("position",)])
def test_a_state_that_cannot_be_had_is_the_fork_s_problem(
    tmp_path: Path, after_step: tuple[str, ...] | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, folder=tmp_path) as run:
        extras = CloneExtras({}, {}, {"position": Broken()}, after_step)
        if after_step:
            late = StepExtras(extras, run, 1, {})
            assert not late.complete
            with pytest.raises(sapwood.SapwoodError, match="no state today"):
                late.take()
            return
        with pytest.raises(sapwood.SapwoodError, match="state of position could not be taken"):
            StepExtras(extras, run, 1, {})


class Known:
    """What a fork knows of its parent when the script asks for its own."""

    model = nn.Linear(1, 1)
    schedulers: tuple[Any, ...] = ()
    optimizer = None
    tuner = Position()
    scaler = None


def test_what_the_parent_shares_and_the_clone_does_not_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fork = Fork.__new__(Fork)
    fork._failure = fork._receiver = fork._factors = None
    fork._run, fork._rank = Known(), 0  # type: ignore[assignment]
    fork.forked_from = ForkedFrom(run="parent", step=3)
    fork._mine = {}
    fork._common = {"shared": {"bucket sizes": {}, "scheduler 0": {}, "data": {"sum": 3.0}}}
    fork.restore({}, {})
    assert [r.getMessage() for r in caplog.records] == [
        "while forking parent: data was saved but is not here"
    ]
    caplog.clear()
    losses = Losses()
    fork.restore({"data": losses}, {})
    assert (losses.sum, caplog.records) == (3.0, [])


# -- one order, one fork ---------------------------------------------------------------------


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def receive_and_make_another(folder: Path) -> dict[str, Any]:
    logger = logging.getLogger("sapwood.clone.forked")
    kept = Kept()
    logger.addHandler(kept)
    loop = Loop(folder, "exponential", by_hand=True)
    assert loop.run.override("data.seed", 1) == 7
    loop.step()
    other = nn.Linear(6, 2)
    with sapwood.Run(other, torch.optim.SGD(other.parameters(), lr=0.1), folder=folder) as second:
        again = second.forked_from
    parent = loop.run.forked_from
    assert parent is not None
    name = loop.run.id
    loop.run.close()
    return {
        "parent": parent.run,
        "again": again,
        "texts": kept.texts,
        "environment": os.environ[ENV],
        "id": name,
    }


def test_a_second_run_of_a_clone_s_script_is_an_ordinary_one_and_what_is_not_done_is_said(
    tmp_path: Path,
) -> None:
    with ranks.start(donate, 1, tmp_path, "exponential", True, None, False) as group:
        group.wait_mark("open", rank=0, timeout=60)
        home = home_of(tmp_path)
        env = order(home, overrides={"data.seed": 7, "data.sed": 8, "optimizer.lr": 0.5})
        (clone,) = ranks.spawn(receive_and_make_another, 1, tmp_path / "clone", env=env)
        (tmp_path / "stop").touch()
        (outcome,) = group.wait(timeout=60)
    assert outcome.error is None, outcome.error
    assert outcome.value["forks"] == [(True, "")]
    assert clone["parent"] == home.name
    assert clone["again"] is None
    assert clone["environment"] == "", "nor does a process that this one starts"
    unasked, lost, unknown, second = clone["texts"]
    assert "data.sed=... has changed nothing so far" in unasked
    assert "the parent's 'average', 'losses', 'position', 'scheduler' came with the fork" in lost
    assert "a scheduler was made for this optimizer that this Run does not know" in unknown
    assert f"its run {clone['id']} goes on" in second
    assert "this Run is not a fork" in second
