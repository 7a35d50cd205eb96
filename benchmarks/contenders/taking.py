"""How contenders take a checkpoint in the middle of their training; the peers."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from core.rank import Context

from .files import sync_tree
from .saver import Saver
from .savers import SAVERS
from .training import Ddp, Training


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
