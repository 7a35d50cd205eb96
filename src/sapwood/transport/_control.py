"""A thin TCP connection between each donor and receiver, beside an engine that moves the bytes.

It carries what the two sides of a message must tell each other, and tells at once when a process is
gone, which the engines do late or never.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from sapwood.errors import TransportError
from sapwood.runtime.host import bind_for
from sapwood.runtime.stores import Store
from sapwood.transport._meet import BACKLOG, HELLO, Deadline, accept, exchange, late
from sapwood.transport.base import Ends

__all__ = ["Control", "Packet", "meet"]

_PACKET = struct.Struct("!BqQQ")
Packet = tuple[int, int, int, int]
"""Kind, tag, and two numbers."""
_SEND_TIMEOUT = struct.pack("ll", 5, 0)


class Control:
    """The connections and the thread that listens to them."""

    def __init__(self, wires: dict[int, socket.socket], facts: list[str]) -> None:
        """``facts``: what each process said about itself when they met, by number."""
        self.facts = facts
        self.on_packet: Callable[[int, Packet], None] = lambda peer, packet: None
        self.on_gone: Callable[[int], None] = lambda peer: None
        self._wires = wires
        self._locks = {peer: threading.Lock() for peer in wires}
        self._closing = threading.Lock()
        self._closed = False
        self._wake, self._wake_there = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._loop, name="sapwood-control", daemon=True)

    def start(self) -> None:
        """Begin to listen, now that both callbacks are set."""
        self._thread.start()

    def tell(self, peer: int, packet: Packet) -> None:
        """Send a packet; a peer that is gone is reported by ``on_gone``, not here."""
        wire = self._wires[peer]
        with self._locks[peer]:
            try:
                wire.sendall(_PACKET.pack(*packet))
            except OSError:
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections and the thread."""
        # Several threads may end a link. A descriptor that is closed twice may be another's file.
        with self._closing:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_there)
        if self._thread.ident is None:  # it never began
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _end(self) -> None:
        """Close what the thread has used, when nobody uses it any more."""
        for peer, wire in self._wires.items():
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)  # wakes whoever sends on it
            with self._locks[peer]:
                wire.close()
        os.close(self._wake)

    def _loop(self) -> None:
        try:
            self._listen()
        finally:
            self._end()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, -1)
            for peer, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, peer)
            rest = dict.fromkeys(self._wires, b"")
            while True:
                for key, _ in selector.select():
                    number: int = key.data
                    if number < 0:
                        return
                    unread = self._read(number, rest[number])
                    if unread is None:
                        selector.unregister(self._wires[number])
                        self.on_gone(number)
                    else:
                        rest[number] = unread

    def _read(self, peer: int, rest: bytes) -> bytes | None:
        try:
            more = self._wires[peer].recv(64 * _PACKET.size)
        except OSError:
            more = b""
        if not more:
            return None
        rest += more
        while len(rest) >= _PACKET.size:
            self.on_packet(peer, _PACKET.unpack(rest[: _PACKET.size]))
            rest = rest[_PACKET.size :]
        return rest


def meet(name: str, store: Store, ends: Ends, fact: str, deadline: Deadline) -> Control:
    """Connect each donor with each receiver, and tell all what each says about itself."""
    token = secrets.token_bytes(32)
    wires: dict[int, socket.socket] = {}
    host = "127.0.0.1" if ends.one_machine else bind_for(ends.hosts[ends.me])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family, backlog=BACKLOG) as listener:
            at = [listener.getsockname()[1], token.hex(), fact]
            met = exchange(name, store, ends, at, deadline)
            if ends.me < ends.donors:
                accept(listener, token, ends, deadline, wires)
            else:
                _connect(met, ends, deadline, wires)
        for wire in wires.values():
            wire.settimeout(None)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Control(wires, [str(one[2]) for one in met])
    except BaseException as error:
        for wire in wires.values():
            wire.close()
        if isinstance(error, TimeoutError):
            raise late(name, "another process", ends.timeout) from error
        if isinstance(error, OSError):
            raise TransportError(f"{name}: cannot meet the others: {error}") from error
        raise


def _connect(
    met: list[tuple[int, str, str]], ends: Ends, deadline: Deadline, wires: dict[int, socket.socket]
) -> None:
    for peer in ends.peers:
        port, token, _ = met[peer]
        host = "127.0.0.1" if ends.one_machine else ends.hosts[peer]
        wires[peer] = socket.create_connection((host, port), timeout=deadline.left or 0.001)
        wires[peer].sendall(HELLO.pack(ends.me, bytes.fromhex(token)))
