"""Both sides of a fork, for ours and for the peers: who waits for what, and what is timed."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core.rank import Context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .fork_ablation import ABLATIONS, NONE
from .fork_meeting import WAIT, Turn
from .fork_training import ForkedSapwood, Fresh, Noting, fresh
from .fork_ways import Way
from .training import Workload



@dataclass(frozen=True, kw_only=True)
class Order:
    """What a clone asks for, and what is left out of it."""

    approach: str = "deepclone"
    transport: str = ""
    """Without one: memory on one machine, gloo between machines."""
    gated: bool = False
    """Whether the first forward pass begins before all is there, as it does for users."""
    without: str = NONE

    @property
    def since(self) -> str:
        return "backward" if self.approach == "deepclone" else "end"


ORDERS = {
    "sapwood": Order(),
    "sapwood gated": Order(gated=True),
    "sapwood gloo": Order(transport="gloo"),
    "sapwood lazy": Order(approach="lazy"),
    "sapwood p2p": Order(approach="p2p"),
    "sapwood unsharded": Order(transport="gloo", without="unsharded"),
    "sapwood unpacked": Order(transport="gloo", without="unpacked"),
    "sapwood sliced": Order(transport="gloo", without="sliced"),
}
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


class Clone(ABC):
    since = "end"
    """When it must be there; see ``fork_costs.needed_from``."""
    whole = True
    """Whether it has a state to train with, and not only its share of one."""

    def __init__(self, workload: Workload, context: Context) -> None:
        self.workload, self.context = workload, context
        self.needed = 0.0
        """When it began to be busy, for those that come late."""

    def build(self) -> Fresh:
        return fresh(self.workload)

    @abstractmethod
    def receive(self, state: Fresh, turn: Turn) -> None:
        """From ``go`` until this clone could train."""

    def complete(self) -> None:
        """Wait until the whole state is there, where ``receive`` does not."""
        return

    def train(self, state: Fresh, ready: Callable[[], None]) -> None:
        """The first step of its own; calls ``ready`` when the state is whole."""
        ready()
        self.step(state)

    @abstractmethod
    def step(self, state: Fresh) -> None:
        """An ordinary step."""

    def loss(self, model: nn.Module) -> Tensor:
        x, y = self.workload.batches[0]
        loss: Tensor = self.workload.source.loss(model(x), y)
        return loss

    def end(self) -> None:
        return

    def close(self) -> None:
        return


class PeerClone(Clone):
    def __init__(self, workload: Workload, context: Context, way: Way) -> None:
        super().__init__(workload, context)
        self.way = way
        self.since, self.whole = way.since, way.whole
        self.model: nn.Module | None = None

    def build(self) -> Fresh:
        """With all that training needs, so that it can begin at once."""
        state = super().build().with_optimizer_state()
        self.model = DistributedDataParallel(state.model, gradient_as_bucket_view=True)
        return state

    def receive(self, state: Fresh, turn: Turn) -> None:
        turn.hear("go")
        self.way.post(state, turn)
        turn.count("posted", self.context.world)
        self.way.take(state, turn)
        self.needed = self.way.needed

    def step(self, state: Fresh) -> None:
        assert self.model is not None
        if self.whole:
            self.loss(self.model).backward()
            state.optimizer.step()

    def end(self) -> None:
        self.model = None
        self.way.end()

    def close(self) -> None:
        self.way.close()


class OurClone(Clone):
    def __init__(self, workload: Workload, context: Context, name: str) -> None:
        super().__init__(workload, context)
        self.order = ORDERS[name]
        self.since = self.order.since
        self.run: Any = None
        self.turn = contextlib.ExitStack()

    def receive(self, state: Fresh, turn: Turn) -> None:
        import sapwood
        from sapwood.clone.door import Address
        from sapwood.clone.order import ENV, ForkOrder

        self.turn.enter_context(ABLATIONS[self.order.without]())
        address = Address.read(Path(turn.hear("go")))
        order = ForkOrder(
            address=address, approach=self.order.approach, transport=self.order.transport
        )
        os.environ[ENV] = order.encode()
        try:
            self.run = sapwood.Run(
                state.model, state.optimizer, folder=self.context.scratch / "clones", trace=False
            )
        finally:
            del os.environ[ENV]
        if not self.order.gated:
            self.complete()

    def complete(self) -> None:
        self.run.wait_ready()

    def train(self, state: Fresh, ready: Callable[[], None]) -> None:
        if not self.order.gated:
            super().train(state, ready)
            return
        loss = self.loss(self.run.model)
        ready()  # the whole state is there, verified, when the first forward pass has ended
        loss.backward()
        self.run.step()

    def step(self, state: Fresh) -> None:
        self.loss(self.run.model).backward()
        self.run.step()

    def end(self) -> None:
        self.turn.close()
        if self.run is not None:
            self.run.close()
            self.run = None
