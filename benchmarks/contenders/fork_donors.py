"""The donors of a fork, ours and the peers': what they wait for, and what is timed."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from core.rank import Context

from .fork_ablation import ABLATIONS
from .fork_meeting import WAIT, Turn
from .fork_orders import ORDERS
from .fork_training import ForkedSapwood, Noting
from .fork_ways import Way

FAILED = -1


@dataclass(kw_only=True)
class Forked:
    """What one donor saw, by the machine's clock."""

    asked: float
    begun: float
    backward_at: float
    ended: float
    pair: float
    """Seconds of the step that is cloned and the next one."""


def agreed(value: int) -> int:
    """Donor 0's value, on all donors."""
    shared = torch.tensor([value])
    dist.broadcast(shared, 0)
    return int(shared.item())


class Donor(ABC):
    def __init__(self, training: Noting, context: Context) -> None:
        self.training, self.context = training, context
        self.asked = 0.0

    @abstractmethod
    def join(self, turn: Turn) -> None:
        """Let the clones begin; returns when the next step is the one to be cloned."""

    def fork(self, turn: Turn) -> Forked:
        """Train it, and the next."""
        training = self.training
        begun = time.perf_counter()
        training.step()
        backward_at, ended = training.backward_at, training.ended_at
        self.next_step(turn)
        return Forked(
            asked=self.asked,
            begun=begun,
            backward_at=backward_at,
            ended=ended,
            pair=time.perf_counter() - begun,
        )

    def next_step(self, turn: Turn) -> None:
        """The step behind the one that is cloned."""
        self.training.step()

    def settle(self) -> None:
        """All clones are ready; wait until nothing more is done for them."""
        return

    @abstractmethod
    def sent(self) -> int:
        """Bytes that left this donor."""

    def end(self) -> None:
        return

    def close(self) -> None:
        self.training.close()

    def go(self, turn: Turn, word: Any = None) -> None:
        self.asked = time.perf_counter()
        if self.context.rank == 0:
            turn.say("go", word)


class PeerDonor(Donor):
    def __init__(self, training: Noting, context: Context, way: Way) -> None:
        super().__init__(training, context)
        self.way = way

    def join(self, turn: Turn) -> None:
        self.way.prepare(self.training, turn)
        self.go(turn)
        turn.hear("posted")
        self.training.step()  # after the wait, the first step is slower

    def next_step(self, turn: Turn) -> None:
        self.way.send(self.training, turn)
        self.training.step(lambda: self.way.before_update(turn))  # type: ignore[call-arg]

    def sent(self) -> int:
        return self.way.sent(self.training)

    def end(self) -> None:
        self.way.end()

    def close(self) -> None:
        self.way.close()
        super().close()


class OurDonor(Donor):
    training: ForkedSapwood

    def __init__(self, training: ForkedSapwood, context: Context, name: str) -> None:
        super().__init__(training, context)
        self.without = ABLATIONS[ORDERS[name].without]
        self.turn = contextlib.ExitStack()

    def join(self, turn: Turn) -> None:
        self.turn.enter_context(self.without())
        run = self.training.run
        self.known = len(run.forks)
        self.go(turn, str(run.folder))
        deadline = time.monotonic() + WAIT
        while (step := agreed(self.announced(turn, deadline))) != run.step_count + 1:
            if step == FAILED:
                raise RuntimeError(f"the fork failed: {self.why()}")
            self.training.step()

    def announced(self, turn: Turn, deadline: float) -> int:
        """The step that will be cloned, 0 while it is not known; donor 0 knows it first."""
        if turn.heard("failed") or self.why() or time.monotonic() > deadline:
            return FAILED
        report = self.report()
        return 0 if report is None else report.step

    def report(self) -> Any:
        new = self.training.run.forks[self.known :]
        return new[0] if new else None

    def why(self) -> str:
        report = self.report()
        return "" if report is None else report.failure

    def settle(self) -> None:
        deadline = time.monotonic() + WAIT
        while not self.report().done:
            if self.why() or time.monotonic() > deadline:
                raise RuntimeError(f"the fork did not end well: {self.why()}")
            time.sleep(0.002)

    def sent(self) -> int:
        return int(self.report().nbytes)

    def end(self) -> None:
        self.turn.close()
