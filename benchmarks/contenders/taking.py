"""How contenders take a checkpoint in the middle of their training: the peers, and ours."""

from __future__ import annotations

import shutil
import threading
import time
from abc import ABC, abstractmethod
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
}
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
            self.checkpointer._saver.pace.choice = self.choice
        self.choice = self.checkpointer._saver.pace.choice
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
