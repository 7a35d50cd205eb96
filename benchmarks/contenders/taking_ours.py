"""How ours takes a checkpoint in the middle of its training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from core.rank import Context

from .taking import Contender, Course, Save
from .training import Sapwood, Training

ENGINE = "node"
"""How ours carries checkpoints on: "node" (a process of its own) or "sync" (in the rank)."""
MODES = {
    "sapwood": "auto",
    "sapwood lazy": "lazy",
    "sapwood backward": "backward",
    "sapwood sharded": "sharded",
    "sapwood single": "single",
    "sapwood partner": "lazy",
    "sapwood parity": "lazy",
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
