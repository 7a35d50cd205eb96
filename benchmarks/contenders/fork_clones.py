"""The clones of a fork, ours and the peers': what they wait for, and their first step."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.rank import Context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .fork_ablation import ABLATIONS
from .fork_meeting import Turn
from .fork_orders import ORDERS
from .fork_training import ForkedSapwood, Fresh, fresh
from .fork_ways import Way
from .training import Workload


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

    def train(self, state: Fresh, ready: Callable[[], None], wait: Callable[[], None]) -> float:
        """The first step of its own; calls ``ready`` when the state is whole, and then ``wait``.

        Seconds from ready until the step has ended, without the wait.
        """
        ready()
        wait()
        begun = time.perf_counter()
        self.step(state)
        return time.perf_counter() - begun

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
        from sapwood.clone.address import Address
        from sapwood.clone.order import ENV, ForkOrder

        self.turn.enter_context(ABLATIONS[self.order.without]())
        address = Address.read(Path(turn.hear("go")))
        order = ForkOrder(
            address=address, approach=self.order.approach, transport=self.order.transport
        )
        os.environ[ENV] = order.encode()
        try:
            # The donors' size: else buckets would be measured in the steps that are timed.
            settings = {"trace": False, "bucket_mb": ForkedSapwood.bucket_mb}
            folder = self.context.scratch / "clones"
            self.run = sapwood.Run(state.model, state.optimizer, folder=folder, **settings)
        finally:
            del os.environ[ENV]
        if not self.order.gated:
            self.complete()

    def complete(self) -> None:
        self.run.wait_ready()

    def train(self, state: Fresh, ready: Callable[[], None], wait: Callable[[], None]) -> float:
        if not self.order.gated:
            return super().train(state, ready, wait)
        loss = self.loss(self.run.model)
        ready()  # the whole state is there, verified, when the first forward pass has ended
        begun = time.perf_counter()
        loss.backward()
        self.run.step()
        return time.perf_counter() - begun

    def step(self, state: Fresh) -> None:
        self.loss(self.run.model).backward()
        self.run.step()

    def end(self) -> None:
        self.turn.close()
        if self.run is not None:
            self.run.close()
            self.run = None
