"""How the peers bring a state to another group of ranks: files, and messages from rank to rank.

A peer gets what it needs to be at its best: it is connected before, receives into tensors that
exist already, and its receives are posted when the donors begin to send. Its packages are imported
when it is used.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from core.rank import Context
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from .files import sync_tree, tree_bytes
from .fork_meeting import WAIT, Turn
from .fork_training import DONORS, Fresh, Noting
from .saver import Saver
from .savers import Safetensors, TorchLoadMmap, TorchSave
from .training import byte_view, state_bytes, state_tensors

TIMEOUT = timedelta(seconds=WAIT)
MPI_PAUSE = 0.0002


class Way(ABC):
    """One peer in one rank of one side: ``send`` and ``before_update`` are what donors wait for."""

    whole = True
    """Whether clones have a state to train with."""
    since = "end"
    """When clones must be there: at the "end" of the cloned step, or when there is a "file"."""

    def __init__(self, context: Context, store: Store) -> None:
        """The two sides, and who of them this process is: donors come first."""
        self.context = context
        self.donates = context.options["side"] == DONORS
        self.me = context.rank + (0 if self.donates else context.world)
        self.partner = context.rank + (context.world if self.donates else 0)
        self.store = store
        self.needed = 0.0

    def prepare(self, training: Noting, turn: Turn) -> None:
        """Untimed: get ready to send."""
        return

    @abstractmethod
    def send(self, training: Noting, turn: Turn) -> None:
        """After the step that is cloned."""

    def before_update(self, turn: Turn) -> None:
        """Before the next step's update."""
        return

    def sent(self, training: Noting) -> int:
        """Bytes this donor has sent."""
        return state_bytes(training.plain, training.optimizer)

    def post(self, state: Fresh, turn: Turn) -> None:
        """Untimed: get ready to receive."""
        return

    @abstractmethod
    def take(self, state: Fresh, turn: Turn) -> None:
        """Returns when the whole state is there."""

    def end(self) -> None:
        """The turn is over."""
        return

    def close(self) -> None:
        return


class Filed(Way):
    """Donor 0 writes a file and syncs it, every clone reads all of it."""

    since = "file"
    writer: type[Saver]
    reader: type[Saver]

    def __init__(self, context: Context, store: Store) -> None:
        super().__init__(context, store)
        self.home = Path(context.options["shared"]) / type(self).__name__
        self.written = 0

    def send(self, training: Noting, turn: Turn) -> None:
        if self.context.rank == 0:
            self.writer(training.plain, training.optimizer, self.context).save(self.home)
            sync_tree(self.home)
            turn.say("file")
            self.written = tree_bytes(self.home)

    def sent(self, training: Noting) -> int:
        return self.written

    def take(self, state: Fresh, turn: Turn) -> None:
        turn.hear("file")
        self.needed = time.perf_counter()
        self.reader(state.model, state.optimizer, self.context).load(self.home)

    def end(self) -> None:
        if self.donates and self.context.rank == 0:
            shutil.rmtree(self.home, ignore_errors=True)


class FiledTorch(Filed):
    writer, reader = TorchSave, TorchLoadMmap


class FiledSafetensors(Filed):
    writer = reader = Safetensors


def cross_group(way: Way, name: str) -> ProcessGroupGloo:
    """A gloo group of both sides, which were started apart."""
    options = ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(interface=way.context.options["interface"])]
    options._threads = 1
    store = PrefixStore(f"group/{name}", way.store)
    return ProcessGroupGloo(store, way.me, 2 * way.context.world, options)


class Gloo(Way):
    """All tensors at once, rank to rank, and then waiting for all."""

    def __init__(self, context: Context, store: Store) -> None:
        super().__init__(context, store)
        self.group = cross_group(self, type(self).__name__)
        self.works: list[Any] = []

    def send(self, training: Noting, turn: Turn) -> None:
        tensors = state_tensors(training.plain, training.optimizer).values()
        views = [byte_view(tensor) for tensor in tensors]
        works = [self.group.send([view], self.partner, tag) for tag, view in enumerate(views)]
        for work in works:
            work.wait(TIMEOUT)

    def post(self, state: Fresh, turn: Turn) -> None:
        tensors = state_tensors(state.model, state.optimizer).values()
        self.views = [byte_view(tensor) for tensor in tensors]
        self.works = [
            self.group.recv([view], self.partner, tag) for tag, view in enumerate(self.views)
        ]

    def take(self, state: Fresh, turn: Turn) -> None:
        for work in self.works:
            work.wait(TIMEOUT)
        self.works, self.views = [], []


class Mpi(Way):
    """The same with mpi4py, connected as our own transport connects."""

    def __init__(self, context: Context, store: Store) -> None:
        if context.options["interface"] != "lo":
            # MPI reads it when it starts. UCX looks at the boot to tell machines apart, and takes
            # the first interface, so it would not leave a namespace.
            os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES=context.options["interface"])
        from sapwood.transport.base import Ends
        from sapwood.transport.mpi import open_mpi

        super().__init__(context, store)
        hosts = tuple(context.options["hosts"])
        ends = Ends(me=self.me, donors=context.world, hosts=hosts, timeout=WAIT)
        self.link = open_mpi(PrefixStore("mpi", store), ends)
        self.comm = self.link._comms[self.partner]
        self.requests: list[Any] = []

    def send(self, training: Noting, turn: Turn) -> None:
        turn.say(f"sending/{self.context.rank}")
        tensors = state_tensors(training.plain, training.optimizer).values()
        views = [byte_view(tensor).numpy() for tensor in tensors]
        self.wait([self.comm.Isend(view, 0, tag) for tag, view in enumerate(views)])

    def post(self, state: Fresh, turn: Turn) -> None:
        tensors = state_tensors(state.model, state.optimizer).values()
        views = [byte_view(tensor).numpy() for tensor in tensors]
        self.requests = [self.comm.Irecv(view, 0, tag) for tag, view in enumerate(views)]

    def take(self, state: Fresh, turn: Turn) -> None:
        # MPI waits by spinning: nobody would let it, while the donors train on the same cores.
        turn.hear(f"sending/{self.context.rank}")
        self.wait(self.requests)
        self.requests = []

    def wait(self, requests: list[Any]) -> None:
        from mpi4py import MPI

        deadline = time.monotonic() + WAIT
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                raise TimeoutError(f"MPI has not moved a state in {WAIT:.0f} s")
            time.sleep(MPI_PAUSE)

    def close(self) -> None:
        self.link.close()


class Loopback(Way):
    """The limit: each donor's share of the bytes, in one message; nothing is rebuilt from them."""

    whole = False

    def __init__(self, context: Context, store: Store) -> None:
        super().__init__(context, store)
        self.group = cross_group(self, type(self).__name__)
        self.buffer = torch.zeros(0, dtype=torch.uint8)

    def share(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // self.context.world)
        if len(self.buffer) != size:
            self.buffer = torch.ones(size, dtype=torch.uint8)
        return self.buffer

    def prepare(self, training: Noting, turn: Turn) -> None:
        self.share(super().sent(training))

    def send(self, training: Noting, turn: Turn) -> None:
        self.group.send([self.buffer], self.partner, 0).wait(TIMEOUT)

    def sent(self, training: Noting) -> int:
        return self.buffer.nbytes

    def post(self, state: Fresh, turn: Turn) -> None:
        buffer = self.share(state_bytes(state.model, state.optimizer))
        self.work = self.group.recv([buffer], self.partner, 0)

    def take(self, state: Fresh, turn: Turn) -> None:
        self.work.wait(TIMEOUT)
