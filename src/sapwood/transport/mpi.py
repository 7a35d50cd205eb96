"""Messages by MPI, between processes that were not started together.

Each pair of a donor and a receiver is connected by MPI's ports. MPI moves on only while it is
called, so a thread of the link asks it as long as messages are under way. MPI lives as long as the
process: what a failed message may still write to is kept, and connections are never given back,
because MPI waits for the other side to do so too.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.stores import Store
from sapwood.transport._control import Control, meet
from sapwood.transport._meet import Deadline, late
from sapwood.transport._message import Message
from sapwood.transport._pmi import managed
from sapwood.transport.base import Ends

__all__ = ["MpiLink", "open_mpi"]

_STARTING = threading.Lock()
_FIRST_PAUSE, _LAST_PAUSE = 0.00002, 0.001
_JOIN_TIMEOUT = 1.0
_KEPT: list[Any] = []
"""Memory that MPI may still write to."""


class MpiLink:
    """One process's end: a communicator per peer, and the thread that makes MPI move on."""

    name = "mpi"
    gathers = False

    def __init__(self, comms: dict[int, Any], control: Control) -> None:
        """Take both; the control wires only tell who is gone."""
        self._comms = comms
        self._control = control
        self._changed = threading.Condition()
        self._under_way: list[tuple[Any, Message]] = []
        self._gone: dict[int, str] = {}
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._loop, name="sapwood-mpi", daemon=True)
        self._thread.start()
        control.on_gone = self._on_gone
        control.start()

    def send(self, peer: int, tag: int, data: Tensor) -> Message:
        """Begin to send; done when it is matched, as this process may end without a word to MPI."""
        return self._begin("Issend", peer, tag, data)

    def recv(self, peer: int, tag: int, data: Tensor) -> Message:
        """Begin to receive."""
        return self._begin("Irecv", peer, tag, data)

    def close(self) -> None:
        """End the thread; what is under way fails."""
        self.fail("the link is closed")
        self._thread.join(_JOIN_TIMEOUT)
        self._control.close()

    def fail(self, why: str) -> None:
        """Fail everything under way and to come."""
        with self._changed:
            self._broken = self._broken or why
            self._drop([message for _, message in self._under_way], why)
            self._changed.notify()

    def _begin(self, act: str, peer: int, tag: int, data: Tensor) -> Message:
        message = Message(self.name, peer, tag, data)
        message.expired = self.fail
        if message.done:
            return message
        with self._changed:
            why = self._broken or self._gone.get(peer)
            if why is not None:
                raise TransportError(f"mpi: {why}; open another link")
            try:
                request = getattr(self._comms[peer], act)(message.bytes, 0, tag)
            except Exception as error:
                raise TransportError(f"mpi: {act} to process {peer}: {error}") from error
            self._under_way.append((request, message))
            self._changed.notify()
        return message

    def _on_gone(self, peer: int) -> None:
        # What it sent before it left may still be on its way to us.
        deadline = time.monotonic() + 1.0
        while self._has(peer) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._changed:
            self._gone[peer] = why = f"process {peer} is gone"
            self._drop([one for _, one in self._under_way if one.peer == peer], why)

    def _has(self, peer: int) -> bool:
        with self._changed:
            return any(one.peer == peer for _, one in self._under_way)

    def _drop(self, messages: list[Message], why: str) -> None:
        for request, message in self._under_way:
            if message in messages:
                _KEPT.append((request, message.bytes))
                message.finish(why)
        self._under_way = [pair for pair in self._under_way if pair[1] not in messages]

    def _loop(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                while not self._under_way and self._broken is None:
                    self._changed.wait()
                if self._broken is not None:
                    return
                moved = self._advance()
            pause = _FIRST_PAUSE if moved else min(pause * 1.5, _LAST_PAUSE)
            time.sleep(pause)

    def _advance(self) -> bool:
        """Ask MPI about every message; whether one is over."""
        rest = []
        for request, message in self._under_way:
            try:
                over, error = request.Test(), None
            except Exception as raised:
                over, error = True, f"MPI: {raised}"
            if over:
                message.release()
                message.finish(error)
            else:
                rest.append((request, message))
        moved = len(rest) < len(self._under_way)
        self._under_way = rest
        return moved


def open_mpi(store: Store, ends: Ends) -> MpiLink:
    """Start MPI if need be, and connect with each process of the other side."""
    deadline = Deadline(ends.timeout)
    mpi = _start()
    port = mpi.Open_port() if ends.me < ends.donors else ""
    try:
        control = meet("mpi", store, ends, port, deadline)
    except BaseException:
        if port:
            mpi.Close_port(port)
        raise
    comms: dict[int, Any] = {}
    failed: list[BaseException] = []
    args = (mpi, store, ends, port, control, comms, failed)
    # MPI knows no timeout: a thread may get stuck, its caller may not.
    thread = threading.Thread(target=_connect, args=args, name="sapwood-mpi-open", daemon=True)
    thread.start()
    thread.join(deadline.left)
    if len(comms) < len(ends.peers):
        control.close()
        if failed:
            raise TransportError(f"mpi: cannot connect: {failed[0]}") from failed[0]
        raise late("mpi", "another process", ends.timeout)
    thread.join(_JOIN_TIMEOUT)
    return MpiLink(comms, control)


def _connect(
    mpi: Any,
    store: Store,
    ends: Ends,
    port: str,
    control: Control,
    comms: dict[int, Any],
    failed: list[BaseException],
) -> None:
    """One pair after the other: donor 0 with all receivers, then donor 1, and so on."""
    try:
        for peer in ends.peers:
            donor, receiver = (ends.me, peer) if port else (peer, ends.me)
            turn = donor * ends.size + receiver
            while store.add("mpi/turn", 0) != _rank_of(turn, ends):
                time.sleep(0.002)
            comm = (
                mpi.COMM_SELF.Accept(port) if port else mpi.COMM_SELF.Connect(control.facts[peer])
            )
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            if port:
                store.add("mpi/turn", 1)
            comms[peer] = comm
        if port:
            mpi.Close_port(port)
    except BaseException as error:
        failed.append(error)


def _rank_of(turn: int, ends: Ends) -> int:
    donor, receiver = divmod(turn, ends.size)
    return donor * (ends.size - ends.donors) + receiver - ends.donors


def _start() -> Any:
    """MPI, started so that threads may use it and errors are exceptions."""
    try:
        import mpi4py
    except ImportError as error:
        raise _missing(error) from error
    with _STARTING:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # it would wait for processes that may be gone
        mpi4py.rc.errors = "exception"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise _missing(error) from error
        if not MPI.Is_initialized():
            if "MPICH" not in MPI.Get_library_version():
                raise ConfigError(
                    "transport 'mpi' needs MPICH, whose processes connect without a common "
                    f"launcher, but this is {MPI.Get_library_version().split(',')[0]}; install "
                    "sapwood[mpi]"
                )
            with managed():
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
            _unlink_shared_memory()
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "transport 'mpi' needs MPI started with THREAD_MULTIPLE: leave mpi4py.rc.threads "
                "and mpi4py.rc.thread_level as they are, or start MPI later"
            )
        return MPI


def _missing(error: BaseException) -> ConfigError:
    return ConfigError(f"transport 'mpi' cannot be loaded: {error}; install sapwood[mpi]")


def _unlink_shared_memory() -> None:
    """Take the names from MPI's shared memory, which it would leave behind if killed."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        path = Path(line.split()[-1])
        if path.name.startswith("mpich_shm_") and path.exists():
            with suppress(OSError):
                path.unlink()
