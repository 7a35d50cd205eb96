"""How contenders take a checkpoint in the middle of their training: the peers, and ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.rank import Context

from .files import sync_tree
from .saver import Saver
from .savers import SAVERS
from .training import Ddp, Sapwood, Training

ENGINE = "node"
"""How ours carries checkpoints on: "node" (a process of its own) or "sync" (in the rank)."""
MODES = {
    "sapwood": "auto",
    "sapwood lazy": "lazy",
    "sapwood backward": "backward",
    "sapwood sharded": "sharded",
    "sapwood single": "single",
    "sapwood partner": "auto",
    "sapwood parity": "auto",
}
TIERS = {
    "sapwood partner": ("memory", "partner", "external"),
    "sapwood parity": ("memory", "parity:{}", "external"),
}
"""Between nodes, which are then the ranks; without an entry, what is used by default."""
SCHEMES = {4: "3+1", 8: "6+2"}
"""Of parity, by the number of nodes."""
NODE = "SAPWOOD_NODE"
# A share of the time that no checkpoint of these turns exceeds: auto must not make them rarer.
NO_BOUND = 0.99


@dataclass(kw_only=True)
class Save:
    """Seconds of one checkpoint in one rank."""

    blocking: float
    pair: float
    """The step that was saved and the next one."""
    preparation: float | None = None
    mode: str = ""
    """How ours captured it."""
    called: float = 0.0
    durable: float = 0.0
    written: int = 0


@dataclass(kw_only=True)
class Course:
    """Seconds of a whole training in one rank, from its first step until its end is durable."""

    run: float
    """All steps, with what checkpoints kept them."""
    ended: float
    """When the last of them had ended, by the clock."""
    taken: int
    """Checkpoints, that of the end not counted."""
    tiers: dict[str, float]
    """From the last step until this rank's share was safe, by tier; ours only."""


def saved_at(step: int, every: int) -> bool:
    """Whether the n-th step of a course is saved.

    In the middle of each stretch: what a checkpoint does behind its step then falls on steps that
    are timed, for a rare one as well as for a frequent one.
    """
    return step % every == every // 2


class Contender(ABC):
    """A training and a way to save it; ``begin`` and ``end`` enclose a turn."""

    warm_saves = 0
    """Checkpoints at the start of a turn that are not measured."""
    plain = 1
    """Ordinary steps before each checkpoint."""

    def __init__(self, training: Training, context: Context, name: str) -> None:
        self.training, self.context = training, context
        home = Path(context.options.get("place") or context.scratch)
        self.folder = home / name.replace(" ", "-").replace(",", "")
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
    def course(self, steps: int, every: int) -> Course:
        """Trains so many steps with checkpoints, saves the last state and waits for it."""

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

    def course(self, steps: int, every: int) -> Course:
        assert isinstance(self.training, Ddp)
        taken = 0
        begun = time.perf_counter()
        for step in range(steps):
            self.training.step(self.saver.before_update)
            if saved_at(step, every):
                taken += 1
                if step < steps - 1:  # the last state is saved below, due or not
                    self.save()
        ended = time.perf_counter()
        self.save()
        return Course(run=ended - begun, ended=ended, taken=taken, tiers={})

    def save(self) -> None:
        """As one would in a training: what is still under way comes first."""
        self.saver.wait()
        self.saves += 1
        self.saver.save(self.place())

    def settle(self) -> None:
        self.saver.wait()

    def sync(self) -> None:
        if not self.saver.syncs:
            sync_tree(self.folder)

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
        self.tiers = TIERS.get(name)
        if self.tiers and any("{}" in tier for tier in self.tiers):
            if context.world not in SCHEMES:
                raise RuntimeError(f"parity needs {', '.join(map(str, SCHEMES))} ranks")
            self.tiers = tuple(tier.format(SCHEMES[context.world]) for tier in self.tiers)
        self.checkpointer: Any = None
        self.choice: Any = None
        self.main = threading.get_ident()

    def begin(self) -> None:
        self.open(self.plain + 2, self.plain + 1)

    def open(self, every: int, first: int) -> None:
        """A Checkpointer whose first checkpoint is that of the ``first`` step from here."""
        import sapwood

        assert isinstance(self.training, Sapwood)
        run = self.training.run
        while (run.step_count + first) % every:
            self.training.step()
        with self.as_node():
            self.checkpointer = sapwood.Checkpointer(
                run,
                self.folder,
                every=every,
                mode=self.mode,
                tiers=self.tiers,
                engine=ENGINE,
                overhead=NO_BOUND,
                keep=None,
            )
        if self.choice is not None:
            self.checkpointer._saver.pace.choice = self.choice
        self.choice = self.checkpointer._saver.pace.choice
        self.on_main: dict[str, bool] = {}
        self.probe = run.events.subscribe(sapwood.TensorUpdated, self.noticed, name="probe")

    @contextlib.contextmanager
    def as_node(self) -> Iterator[None]:
        """Tiers between nodes take each rank for one."""
        if self.tiers is None:
            yield
            return
        os.environ[NODE] = f"node{self.context.rank}"
        try:
            yield
        finally:
            del os.environ[NODE]

    def course(self, steps: int, every: int) -> Course:
        assert isinstance(self.training, Sapwood)
        run, stats = self.training.run, self.checkpointer.stats
        taken = len(stats.saves)
        begun = time.perf_counter()
        for _ in range(steps):
            self.training.step()
        ended = time.perf_counter()
        self.checkpointer.save()  # a step that was due is not saved again
        self.checkpointer.wait()
        taken = len(stats.saves) - taken - (1 if run.step_count % every else 0)
        return Course(run=ended - begun, ended=ended, taken=taken, tiers=stats.saves[-1].durable)

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
            mode=reports[-1].mode,
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
