"""torchft's two ways to heal a rank that joins: each donor gives one clone its whole state.

torchft sends beside the next forward and backward pass, and holds back the update until the joining
rank has everything; so do these.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from core.rank import Context
from torch.distributed import Store

from .fork_meeting import WAIT, Turn
from .fork_training import Fresh, Noting
from .fork_ways import TIMEOUT, Way, cross_group
from .saver import BufferCopies, copy_optimizer

CHUNKS = 0
"""More would read with as many threads; there is no idle core for them."""


class Torchft(Way):
    def __init__(self, context: Context, store: Store) -> None:
        super().__init__(context, store)
        self.buffers: BufferCopies | None = None

    def state(self, training: Noting) -> dict[str, Any]:
        """Forward changes BatchNorm's statistics while they are sent, so copies are."""
        if self.buffers is None:
            self.buffers = BufferCopies(training.plain)
        state = {"model": training.plain.state_dict(), "optim": training.optimizer.state_dict()}
        return self.buffers.in_place_of(state)

    def prepare(self, training: Noting, turn: Turn) -> None:
        self.state(training)


class TorchftHttp(Torchft):
    """The donor serves its live tensors over HTTP."""

    def __init__(self, context: Context, store: Store) -> None:
        from torchft.checkpointing.http_transport import HTTPTransport

        super().__init__(context, store)
        self.transport = HTTPTransport(timeout=TIMEOUT, num_chunks=CHUNKS)

    def prepare(self, training: Noting, turn: Turn) -> None:
        super().prepare(training, turn)
        turn.say(f"address/{self.context.rank}", self.transport.metadata())

    def send(self, training: Noting, turn: Turn) -> None:
        self.transport.send_checkpoint([self.partner], turn.number, self.state(training), TIMEOUT)

    def before_update(self, turn: Turn) -> None:
        turn.hear(f"taken/{self.context.rank}")
        self.transport.disallow_checkpoint()

    def post(self, state: Fresh, turn: Turn) -> None:
        self.address = turn.hear(f"address/{self.context.rank}")

    def take(self, state: Fresh, turn: Turn) -> None:
        # It waits at the donor's door until there is something to be had.
        found = self.transport.recv_checkpoint(self.partner, self.address, turn.number, TIMEOUT)
        turn.say(f"taken/{self.context.rank}")
        state.model.load_state_dict(found["model"])
        copy_optimizer(state.optimizer, found["optim"]["state"])

    def close(self) -> None:
        self.transport.shutdown()


class TorchftPg(Torchft):
    """The donor sends tensor after tensor over a process group, straight into the clone's."""

    def __init__(self, context: Context, store: Store) -> None:
        from torchft.checkpointing.pg_transport import PGTransport

        super().__init__(context, store)
        self.group = cross_group(self, type(self).__name__)
        self.device = torch.device("cpu")
        self.kind = PGTransport
        self.thread: threading.Thread | None = None
        self.failed: list[BaseException] = []

    def send(self, training: Noting, turn: Turn) -> None:
        state = self.state(training)
        self.thread = threading.Thread(target=self.give, args=(turn.number, state), daemon=True)
        self.thread.start()

    def give(self, number: int, state: dict[str, Any]) -> None:
        try:
            transport = self.kind(self.group, TIMEOUT, self.device)
            transport.send_checkpoint([self.partner], number, state, TIMEOUT)
        except BaseException as error:
            self.failed.append(error)

    def before_update(self, turn: Turn) -> None:
        assert self.thread is not None
        self.thread.join(WAIT)
        if self.failed:
            raise self.failed[0]

    def take(self, state: Fresh, turn: Turn) -> None:
        def live() -> dict[str, Any]:
            return {"model": state.model.state_dict(), "optim": state.optimizer.state_dict()}

        transport = self.kind(self.group, TIMEOUT, self.device, live)
        transport.recv_checkpoint(self.partner, transport.metadata(), turn.number, TIMEOUT)
