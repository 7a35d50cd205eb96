"""Donors and clones for tests: two groups of ranks that know each other by a folder only."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

import sapwood
from sapwood.clone.address import Address
from sapwood.clone.order import ENV, ForkOrder
from sapwood.testing import ranks, workloads
from tests.checkpoint.training import Training, make_optimizer

MORE = 4
"""Steps a clone goes on, beside its donor."""


SMALL = {
    "densenet121": {"image": 32, "batch_size": 2, "width": 0.125},
    "mlp": {},
    "nt3": {"mb": 2, "filters": 4, "batch_size": 2},
    "resnet50": {"image": 32, "batch_size": 2, "width": 0.125},
    "resnet152": {"image": 32, "batch_size": 2, "width": 0.125},
    "transformer": {},
}


class WorkloadTraining(Training):
    """One of the workloads of the benchmarks, small."""

    def __init__(self, folder: Path, name: str) -> None:
        self.rank, self.world = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE"))
        self.work = workloads.by_name(name, **SMALL[name])
        self.model = self.work.model()
        self.optimizer = make_optimizer("sgd", self.model)
        self.run = sapwood.Run(self.model, self.optimizer, folder=folder / "runs", timeout=30)

    def step(self) -> float:
        x, y = self.work.batch(self.run.step_count, self.rank, self.world)
        loss = self.work.loss(self.run.model(x), y)
        loss.backward()
        self.run.step()
        return float(loss.detach())


def begin(folder: Path, kind: str) -> Training:
    """The training of a workload, or the one with everything in it and an optimizer of a kind."""
    return WorkloadTraining(folder, kind) if kind in SMALL else Training(folder, kind, timeout=30)


def digest(state: dict[str, Tensor], *, without: str = "") -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(state.keys() - {without}):
        found.update(name.encode() + state[name].contiguous().reshape(-1).numpy().tobytes())
    return found.hexdigest()


def donate(folder: Path, kind: str = "adamw", **settings: Any) -> dict[str, Any]:
    """Train until told to stop; every step's loss and state, and what forks have cost."""
    training = begin(folder, kind)
    run = training.run
    run.allow_clones(**settings)
    losses, states, weights = {}, {}, {}
    ranks.mark("open")
    last, slowest = None, 0.0
    while last is None or run.step_count < last:
        start = time.monotonic()
        loss = training.step()
        slowest = max(slowest, time.monotonic() - start)
        losses[run.step_count] = loss
        state = training.state()
        states[run.step_count] = digest(state)
        weights[run.step_count] = digest(state, without="random")
        time.sleep(0.005)
        if last is None and told_to_stop(run, folder):
            last = run.step_count + MORE
    forks = run.forks
    training.close()
    found = [(f.step, f.done, f.failure, f.waited_seconds) for f in forks]
    return {
        "losses": losses,
        "states": states,
        "weights": weights,
        "forks": found,
        "slowest": slowest,
    }


def told_to_stop(run: sapwood.Run, folder: Path) -> bool:
    """The same on all ranks."""
    return run.group.share_text("stop", str((folder / "stop").exists())) == "True"


def donate_in_step(folder: Path, forks: int, last: int) -> dict[str, Any]:
    """One donor that goes on only when so many forks are asked for, and then ready, or failed."""
    training = begin(folder, "adamw")
    run = training.run
    run.allow_clones()
    losses, states = {}, {}
    ranks.mark("open")
    while run.step_count < last:
        if run.step_count == 2:
            until(lambda: len(run.forks) == forks, "forks")
        if run.step_count == 4:
            until(lambda: all(f.ready or f.failure for f in run.forks), "clones to be ready")
        loss = training.step()
        losses[run.step_count] = loss
        states[run.step_count] = digest(training.state())
    until(lambda: all(f.done or f.failure for f in run.forks), "clones to begin")
    found = [(f.step, f.done, f.failure) for f in run.forks]
    training.close()
    return {"losses": losses, "states": states, "forks": found}


def until(condition: Callable[[], Any], what: str) -> None:
    """Poll; a deadline, not a measure of speed."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def receive(
    folder: Path,
    kind: str = "adamw",
    *,
    serve: bool = False,
    late: float = 0.0,
    not_before: Path | None = None,
) -> dict[str, Any]:
    """Begin as a fork, ``late`` seconds after the state came or when a file is there; go on."""
    training = begin(folder, kind)
    run = training.run
    parent = run.forked_from
    assert parent is not None
    ranks.mark("forked")
    time.sleep(late)
    if not_before is not None:
        until(not_before.exists, str(not_before))
    if serve:
        run.allow_clones()
        ranks.mark("open")
    run.wait_ready()
    state = training.state()
    first, weights = digest(state), digest(state, without="random")
    losses = training.steps(parent.step + MORE)
    last = digest(training.state())
    while serve and not told_to_stop(run, folder):
        training.step()
        time.sleep(0.005)
    training.close()
    return {
        "id": run.id,
        "step": parent.step,
        "parent": parent.run,
        "first": first,
        "weights": weights,
        "losses": losses,
        "last": last,
        "rates": [g["lr"] for g in training.optimizer.param_groups],
    }


def home_of(folder: Path) -> Path:
    """The folder of the run that takes clones."""
    (found,) = (p.parent for p in (folder / "runs").glob("*/address"))
    return found


def order(home: Path, **options: Any) -> dict[str, str]:
    """The environment of a fork of this run."""
    return {ENV: ForkOrder(address=Address.read(home), **options).encode()}


@contextmanager
def donors(folder: Path, world: int, kind: str = "adamw", **settings: Any) -> Iterator[ranks.Group]:
    """A group that trains until the block ends; ``ended`` has what its ranks returned."""
    with ranks.start(donate, world, folder, kind, **settings) as group:
        for rank in range(world):
            group.wait_mark("open", rank=rank, timeout=60)
        yield group


def stop(folder: Path, group: ranks.Group) -> list[dict[str, Any]]:
    """End the donors; what each of them saw."""
    (folder / "stop").touch()
    outcomes = group.wait(timeout=60)
    error = ranks.failure(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]


def goes_on_like(clone: dict[str, Any], donor: dict[str, Any]) -> bool:
    """Whether a clone is its donor's twin, from the first bit to the last."""
    step = clone["step"]
    assert clone["first"] == donor["states"][step], "the state at the start differs"
    wanted = [donor["losses"][n] for n in range(step + 1, step + MORE + 1)]
    assert clone["losses"] == wanted, "losses differ"
    return bool(clone["last"] == donor["states"][step + MORE])


def failed_with(folder: Path, world: int, env: dict[str, str], **options: Any) -> str:
    """The message of clones that cannot begin."""
    try:
        ranks.spawn(receive, world, folder, env=env, **options)
    except sapwood.SapwoodError as error:
        return str(error)
    raise AssertionError("the fork was made")
