"""Messages by Mooncake's Transfer Engine: one-sided writes, over TCP, or RDMA where there is any.

The receiver registers its memory and tells the sender where it is; the sender's thread writes there
and says when it is done. ``SAPWOOD_MOONCAKE_PROTOCOL`` (tcp, rdma) overrides the choice, and
``SAPWOOD_MOONCAKE_DEVICE`` names RDMA devices.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.stores import Store
from sapwood.transport import _sockets
from sapwood.transport._control import Control, Packet, meet
from sapwood.transport._meet import Deadline
from sapwood.transport._message import Message
from sapwood.transport.base import Ends

__all__ = ["MooncakeLink", "open_mooncake"]

_WANT, _DONE = 1, 2
_JOIN_TIMEOUT = 1.0
_MAKING = threading.Lock()
_Key = tuple[int, int]


class MooncakeLink:
    """One process's end: an engine of its own, a thread that writes, and the control wires."""

    name = "mooncake"
    gathers = False

    def __init__(self, engine: Any, control: Control) -> None:
        """Take both; ``control.facts`` are the sessions of all processes."""
        self._engine = engine
        self._control = control
        self._sessions = [one.split()[0] for one in control.facts]
        ports = [(one.split()[0].rpartition(":")[0], one.split()[1:]) for one in control.facts]
        self._addresses = frozenset((host, int(port)) for host, all_ in ports for port in all_)
        self._lock = threading.Lock()
        self._sends: dict[_Key, Message] = {}
        self._receives: dict[_Key, Message] = {}
        self._wanted: dict[_Key, tuple[int, int]] = {}
        self._gone: dict[int, str] = {}
        self._broken: str | None = None
        self._jobs: queue.SimpleQueue[tuple[Message, int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="sapwood-mooncake", daemon=True)
        self._thread.start()
        control.on_packet, control.on_gone = self._on_packet, self._on_gone
        control.start()

    def send(self, peer: int, tag: int, data: Tensor) -> Message:
        """Begin to send, once the receiver has said where to."""
        message = self._message(peer, tag, data)
        if message.done:
            return message
        with self._lock:
            self._check(peer)
            self._sends[peer, tag] = message
            where = self._wanted.pop((peer, tag), None)
        if where is not None:
            self._jobs.put((message, *where))
        return message

    def recv(self, peer: int, tag: int, data: Tensor) -> Message:
        """Begin to receive."""
        message = self._message(peer, tag, data)
        if message.done:
            return message
        with self._lock:
            self._check(peer)
            self._register(data.data_ptr(), message.length)
            self._receives[peer, tag] = message
        self._control.tell(peer, (_WANT, tag, data.data_ptr(), message.length))
        return message

    def close(self) -> None:
        """End the engine, whatever it does: its connections are cut first."""
        self.fail("the link is closed")
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT)
        self._control.close()
        with self._lock:
            self._engine = None

    def fail(self, why: str) -> None:
        """Fail everything under way and to come."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = why
            under_way = [*self._sends.values(), *self._receives.values()]
            self._sends.clear()
            self._receives.clear()
        for message in under_way:
            message.finish(why)
        _sockets.cut(self._addresses)

    def _message(self, peer: int, tag: int, data: Tensor) -> Message:
        message = Message(self.name, peer, tag, data)
        message.expired = self.fail
        return message

    def _check(self, peer: int) -> None:
        why = self._broken or self._gone.get(peer)
        if why is not None:
            raise TransportError(f"mooncake: {why}; open another link")

    def _register(self, address: int, length: int) -> None:
        if self._engine.register_memory(address, length):
            raise TransportError(f"mooncake: cannot register {length} bytes of memory")

    def _on_gone(self, peer: int) -> None:
        why = f"process {peer} is gone"
        with self._lock:
            self._gone[peer] = why
            both = (self._sends, self._receives)
            lost = [one.pop(key) for one in both for key in list(one) if key[0] == peer]
        for message in lost:
            message.finish(why)

    def _on_packet(self, peer: int, packet: Packet) -> None:
        kind, tag, address, length = packet
        if kind == _WANT:
            with self._lock:
                sending = self._sends.get((peer, tag))
                if sending is None:
                    self._wanted[peer, tag] = (address, length)
            if sending is not None:
                self._jobs.put((sending, address, length))
        elif kind == _DONE:
            with self._lock:
                received = self._receives.pop((peer, tag), None)
                if received is not None and received.bytes is not None:
                    self._engine.unregister_memory(received.bytes.ctypes.data)
            if received is not None:
                received.release()
                received.finish()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = self._write(*job)
            message = job[0]
            with self._lock:
                self._sends.pop((message.peer, message.tag), None)
            if error is None:
                self._control.tell(message.peer, (_DONE, message.tag, 0, 0))
                message.finish()
            elif self._broken is None:
                message.finish(error)
                self.fail(error)
            message.release()
            del job, message

    def _write(self, message: Message, address: int, length: int) -> str | None:
        engine, memory = self._engine, message.bytes
        if message.done or engine is None or memory is None:
            return "the message was given up"
        if length != message.length:
            return f"message {message.tag} has {message.length} bytes, but {length} are expected"
        source = memory.ctypes.data
        if engine.register_memory(source, length):
            return f"cannot register {length} bytes of memory"
        try:
            session = self._sessions[message.peer]
            failed = engine.transfer_sync_write(session, source, address, length)
        finally:
            engine.unregister_memory(source)
        return f"the engine could not write to process {message.peer}" if failed else None


def open_mooncake(store: Store, ends: Ends) -> MooncakeLink:
    """Start an engine, and meet the others."""
    deadline = Deadline(ends.timeout)
    engine, fact = _engine(ends)
    return MooncakeLink(engine, meet("mooncake", store, ends, fact, deadline))


def _engine(ends: Ends) -> tuple[Any, str]:
    """An engine, and its session with the ports it listens on."""
    # Its log goes to stderr, line by line; warnings are of the machine, not of the run.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"transport 'mooncake' cannot be loaded: {error}; install sapwood[mooncake], and the "
            "system's libibverbs1, libnl-3-200 and libnl-route-3-200 (Debian's names)"
        ) from error
    host = "127.0.0.1" if ends.one_machine else ends.hosts[ends.me]
    protocol, devices = _protocol()
    with _MAKING:
        before = set(_sockets.listeners())
        engine = TransferEngine()
        if engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise ConfigError(
                f"Mooncake's engine does not start with protocol {protocol!r} on {host!r}: set "
                "SAPWOOD_MOONCAKE_PROTOCOL=tcp, or name the RDMA device in SAPWOOD_MOONCAKE_DEVICE"
            )
        ports = sorted({port for _, port in set(_sockets.listeners()) - before})
    return engine, " ".join([f"{host}:{engine.get_rpc_port()}", *map(str, ports)])


def _protocol() -> tuple[str, str]:
    devices = os.environ.get("SAPWOOD_MOONCAKE_DEVICE", "")
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    chosen = os.environ.get("SAPWOOD_MOONCAKE_PROTOCOL") or ("rdma" if has_rdma else "tcp")
    if chosen not in ("tcp", "rdma"):
        raise ConfigError(f"SAPWOOD_MOONCAKE_PROTOCOL={chosen!r}, but it is 'tcp' or 'rdma'")
    return chosen, devices
