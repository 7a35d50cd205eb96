"""The inside of a rank: what a process started by ``sapwood.testing.ranks`` does.

The fork server loads this module, so everything slow that a rank needs is imported here, once.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from sapwood.errors import UsageError
from sapwood.testing import _proc
from sapwood.testing._netspace import enter

HEADER = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a rank is to do. ``call`` is the pickled function with its arguments.

    ``namespace`` is the path of the network namespace to do it in, if not the parent's.
    """

    call: bytes
    env: Mapping[str, str]
    cwd: str
    threads: int
    init: bool
    namespace: str | None = None


class _Wire:
    """The rank's end of the pipe to its parent; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, *facts: Any) -> None:
        # Plain pickle: the one of multiprocessing would send tensors as shared memory, which is
        # gone when the rank is.
        body = pickle.dumps((kind, time.monotonic(), facts))
        data = memoryview(HEADER.pack(len(body)) + body)
        with self._lock:
            while data:
                data = data[os.write(self._connection.fileno(), data) :]


_wire: _Wire | None = None


def mark(name: str) -> None:
    """Tell the parent that this rank has come to ``name``; see ``Group.wait_mark``."""
    if _wire is None:
        raise UsageError("mark() was called outside a rank of sapwood.testing.ranks")
    _wire.send("mark", name)


def main(order: Order, reports: Connection, stacks: Connection) -> None:
    """Run one rank from its start to its report."""
    global _wire
    _wire = _Wire(reports)
    _settle(stacks)
    _wire.send("started")
    try:
        value = _run(order)
        # A value that cannot be pickled must be told as this rank's error, so it is tried here.
        pickle.dumps(value)
    except SystemExit:
        raise
    except BaseException as error:
        _wire.send("raised", type(error).__name__, traceback.format_exc())
        _leave()
    _wire.send("returned", value)


def _leave() -> NoReturn:
    # Threads the failed function left behind must not keep its rank alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _settle(stacks: Connection) -> None:
    # A session of its own: the terminal's Ctrl-C goes to the parent only, and whatever the rank
    # starts can be found and ended with it.
    os.setsid()
    _follow_parent()
    faulthandler.enable(file=stacks.fileno())
    # Not SIGUSR1, which asks a run to stop.
    faulthandler.register(signal.SIGUSR2, file=stacks.fileno(), all_threads=True)


def _follow_parent() -> None:
    # The fork server ends when every process that holds this descriptor has ended. Without it the
    # server ends with the parent alone, and the kernel then ends the ranks, stopped ones included.
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        with suppress(OSError):
            os.close(alive)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 - not part of its stub
    _proc.die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _run(order: Order) -> Any:
    if order.namespace is not None:
        # Before any thread or socket: both keep the namespace they were made in.
        enter(order.namespace)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    torch.set_num_threads(order.threads)
    function, args, kwargs = pickle.loads(order.call)  # noqa: S301 - made by our own parent
    if not order.init:
        return function(*args, **kwargs)
    dist.init_process_group("gloo")
    try:
        return function(*args, **kwargs)
    finally:
        dist.destroy_process_group()
