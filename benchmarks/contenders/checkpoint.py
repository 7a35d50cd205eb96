"""What runs inside the ranks of checkpoint_step.py: steps, a checkpoint, and the step after it.

A turn of a contender is: ordinary steps, the step that is saved, the next step, and then, outside
what is timed, waiting until the checkpoint is durable. Nothing of a checkpoint reaches into the
turn of another contender.
"""

from __future__ import annotations

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.processes import group_cpu_seconds
from core.rank import Context

from .files import sync_tree, tree_bytes
from .savers import SAVERS, Saver
from .training import (
    Ddp,
    Sapwood,
    Training,
    Workload,
    clones,
    digests,
    prepare,
    put_back,
    spoil,
    state_bytes,
)

__all__ = ["CONTENDERS", "create", "prepare", "size", "turn", "verify"]

ENGINE = "sync"
"""How ours carries checkpoints on: "node" (a process of its own) or "sync" (in the rank)."""
MODES = {
    "sapwood": "auto",
    "sapwood lazy": "lazy",
    "sapwood backward": "backward",
    "sapwood sharded": "sharded",
    "sapwood single": "single",
}
BASELINES: dict[str, type[Training]] = {
    "no checkpoint, ddp": Ddp,
    "no checkpoint, sapwood": Sapwood,
}
# auto tries two ways twice each; a turn tells it of two checkpoints, or one.
AUTO_TURNS = 4
# A share of the time that no checkpoint of these turns exceeds: auto must not make them rarer.
NO_BOUND = 0.99


@dataclass(kw_only=True)
class Save:
    """Seconds of one checkpoint in one rank."""

    blocking: float
    pair: float
    """The step that was saved and the next one."""
    preparation: float | None = None
    called: float = 0.0
    durable: float = 0.0
    written: int = 0


class Contender(ABC):
    """A training and a way to save it; ``begin`` and ``end`` enclose a turn."""

    warm_saves = 0
    """Checkpoints at the start of a turn that are not measured."""
    plain = 1
    """Ordinary steps before each checkpoint."""

    def __init__(self, training: Training, context: Context, name: str) -> None:
        self.training, self.context = training, context
        self.folder = context.scratch / name.replace(" ", "-").replace(",", "")
        self.saves = 0

    @abstractmethod
    def begin(self) -> None:
        """The turn begins."""

    @abstractmethod
    def checkpoint(self) -> Save:
        """Trains the step that is saved, and the next."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until the last checkpoint is done, as far as the contender goes by itself."""

    @abstractmethod
    def restore(self) -> None:
        """Loads the last checkpoint into the training."""

    def sync(self) -> None:
        """What is missing to durability after ``settle``; rank 0 does it for all."""
        return

    def end(self) -> None:
        self.context.barrier()
        if self.context.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self.training.close()


class Peer(Contender):
    def __init__(self, training: Training, context: Context, name: str) -> None:
        super().__init__(training, context, name)
        self.saver: Saver = SAVERS[name](training.plain, training.optimizer, context)

    def begin(self) -> None:
        if self.context.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.context.barrier()

    def place(self) -> Path:
        return self.folder / f"save-{self.saves}"

    def checkpoint(self) -> Save:
        assert isinstance(self.training, Ddp)
        self.saves += 1
        begun = time.perf_counter()
        self.training.step()
        called = time.perf_counter()
        self.saver.save(self.place())
        blocking = time.perf_counter() - called
        waited = 0.0

        def fence() -> None:
            nonlocal waited
            start = time.perf_counter()
            self.saver.before_update()
            waited = time.perf_counter() - start

        self.training.step(fence)
        pair = time.perf_counter() - begun
        return Save(blocking=blocking + waited, pair=pair, called=called)

    def settle(self) -> None:
        self.saver.wait()

    def sync(self) -> None:
        if not self.saver.syncs:
            sync_tree(self.place())

    def restore(self) -> None:
        self.saver.load(self.place())

    def close(self) -> None:
        self.saver.close()
        super().close()


class Ours(Contender):
    """A Checkpointer per turn, so that the staging memory of one mode is there at a time.

    What auto learned is handed on from turn to turn, as if it were one long run.
    """

    warm_saves = 1  # a new Checkpointer plans and maps its memory at its first checkpoint
    plain = 2  # the first step of a turn tells auto nothing: it cannot know when it began

    def __init__(self, training: Training, context: Context, name: str) -> None:
        super().__init__(training, context, name)
        self.mode = MODES[name]
        self.checkpointer: Any = None
        self.choice: Any = None
        self.main = threading.get_ident()

    def begin(self) -> None:
        import sapwood

        assert isinstance(self.training, Sapwood)
        run, every = self.training.run, self.plain + 2
        while (run.step_count + self.plain + 1) % every:
            self.training.step()
        self.checkpointer = sapwood.Checkpointer(
            run,
            self.folder,
            every=every,
            mode=self.mode,
            engine=ENGINE,
            overhead=NO_BOUND,
            keep=None,
        )
        if self.choice is not None:
            self.checkpointer._choice = self.choice
        self.choice = self.checkpointer._choice
        self.on_main: dict[str, bool] = {}
        self.probe = run.events.subscribe(sapwood.TensorUpdated, self.noticed, name="probe")

    def noticed(self, event: Any) -> None:
        self.on_main["TensorUpdated"] = threading.get_ident() == self.main

    def kept(self) -> float:
        """Seconds the training has been kept so far, as the event bus and the fences counted them.

        Handlers of updates count where updates run on the training's thread.
        """
        assert isinstance(self.training, Sapwood)
        run = self.training.run
        seconds = float(run.stats.fence_seconds.get("checkpoint", 0.0))
        for one in run.events.subscriptions():
            counts = one.kind.__name__ == "StepEnded" or self.on_main.get(one.kind.__name__, True)
            if one.name == "checkpoint" and counts:
                seconds += one.seconds
        return seconds

    def checkpoint(self) -> Save:
        reports = self.checkpointer.stats.saves
        known, kept = len(reports), self.kept()
        self.saves += 1
        first = self.training.timed_step()
        called = time.perf_counter()
        second = self.training.timed_step()
        blocking = self.kept() - kept
        self.checkpointer.wait()
        if len(reports) != known + 1:
            raise RuntimeError(f"{len(reports) - known} checkpoints were taken, not 1")
        return Save(
            blocking=blocking,
            pair=first + second,
            preparation=reports[-1].preparation_seconds,
            called=called,
        )

    def settle(self) -> None:
        failed = self.checkpointer.stats.saves[-1].failed
        if failed:
            raise RuntimeError(f"a tier failed: {failed}")

    def restore(self) -> None:
        if self.checkpointer.restore_latest() is None:
            raise RuntimeError("there is no checkpoint")

    def end(self) -> None:
        self.probe.cancel()
        self.checkpointer.close()
        self.checkpointer = None
        super().end()


def measured(contender: Contender) -> dict[str, Any]:
    """One checkpoint, with the CPU time of all processes until it is durable."""
    context = contender.context
    context.barrier()
    leads = context.rank == 0
    cpu, had = (group_cpu_seconds(), tree_bytes(contender.folder)) if leads else (0.0, 0)
    context.barrier()
    found = contender.checkpoint()
    contender.settle()
    context.barrier()
    if leads:
        contender.sync()
    context.barrier()
    found.durable = time.perf_counter() - found.called
    if leads:
        cpu = group_cpu_seconds() - cpu
        found.written = tree_bytes(contender.folder) - had
    return {**asdict(found), "cpu": cpu}


def turn(
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    contender: str,
    baseline_steps: int,
) -> dict[str, Any]:
    if contender in BASELINES:
        return baseline(made[contender], context, baseline_steps)
    try:
        return save_once(made[contender])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def save_once(chosen: Contender) -> dict[str, Any]:
    chosen.begin()
    for _ in range(chosen.warm_saves):
        plain_steps(chosen)
        measured(chosen)
    plain_steps(chosen)
    found = measured(chosen)
    chosen.end()
    return found


def plain_steps(contender: Contender) -> None:
    for _ in range(contender.plain):
        contender.training.step()


def baseline(training: Training, context: Context, steps: int) -> dict[str, Any]:
    training.step()
    context.barrier()
    cpu = group_cpu_seconds() if context.rank == 0 else 0.0
    context.barrier()
    seconds = [training.timed_step() for _ in range(steps)]
    context.barrier()
    used = group_cpu_seconds() - cpu if context.rank == 0 else 0.0
    return {"steps": seconds, "cpu": used / steps}


def create(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """Makes a contender; a peer that cannot be made is reported and does not end the rank."""
    try:
        made[contender] = CONTENDERS[contender](workload, context)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def verify(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """Saves, trains on, spoils the state and loads it: digests of what was and what came back."""
    if contender in BASELINES or contender == "memcpy":
        turn(workload, context, made, contender, 1)
        return {}
    try:
        return saved_and_loaded(made[contender])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def saved_and_loaded(contender: Contender) -> dict[str, Any]:
    """What the saved step left is known by training it again, from the state before it.

    A digest taken between the save and the next step would give a capture time to finish, and so
    hide one that the next step can tear.
    """
    if isinstance(contender, Ours) and contender.mode == "auto":
        learn(contender)
    contender.begin()
    training = contender.training
    plain_steps(contender)
    before, steps = clones(training.plain, training.optimizer), training.steps
    contender.checkpoint()
    contender.settle()
    put_back(before, training.plain, training.optimizer)
    training.steps = steps
    training.step()
    live = digests(training.plain, training.optimizer)
    contender.context.barrier()
    spoil(training.plain, training.optimizer)
    contender.restore()
    loaded = digests(training.plain, training.optimizer)
    contender.end()
    return {"live": live, "loaded": loaded}


def learn(contender: Contender) -> None:
    """Turns in which auto finds out what each way costs."""
    for _ in range(AUTO_TURNS):
        contender.begin()
        for _ in range(2):
            plain_steps(contender)
            measured(contender)
        contender.end()


def size(workload: Workload, context: Context, made: dict[str, Any]) -> int:
    training = workload.training(Ddp, context)
    return state_bytes(training.plain, training.optimizer)


def peer(name: str) -> Callable[[Workload, Context], Contender]:
    return lambda workload, context: Peer(workload.training(Ddp, context), context, name)


def ours(name: str) -> Callable[[Workload, Context], Contender]:
    return lambda workload, context: Ours(workload.training(Sapwood, context), context, name)


CONTENDERS: dict[str, Callable[[Workload, Context], Any]] = {
    **{name: ours(name) for name in MODES},
    **{name: peer(name) for name in SAVERS},
    **{
        name: lambda workload, context, kind=kind: workload.training(kind, context)
        for name, kind in BASELINES.items()
    },
}
