"""Listeners for the tests of the control channel, and what is said to them."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sapwood.channel.connection import Connection
from sapwood.channel.dial import dial_tcp, dial_unix
from sapwood.channel.handshake import key_of
from sapwood.channel.listener import Limits, Listener, bind_tcp, bind_unix
from sapwood.channel.tls import client_context, server_context

HERE = Path(__file__).parent
TOKEN, OTHER = "a token", "another token"
TOKENS = {key_of(token): token for token in (TOKEN, OTHER)}
WAYS = ("tcp", "unix", "tls")
LIMITS = Limits(unproven=4, greeting=20.0, proven=8, timeout=5.0)


def echo(connection: Connection) -> None:
    """Give back each message with its bytes, and say which token the client knows."""
    connection.allow_fds(4)
    while True:
        message = connection.receive(timeout=30.0)
        data = bytearray(message.get("nbytes", 0))
        connection.receive_into(data)
        fds = connection.take_fds()
        sizes = [os.fstat(fd).st_size for fd in fds]
        for fd in fds:
            os.close(fd)
        connection.send({**message, "key": connection.key, "sizes": sizes})
        connection.send_bytes(data)


class Place:
    """A listener and how to reach it."""

    def __init__(
        self,
        way: str,
        serve: Callable[[Connection], None] = echo,
        token_of: Callable[[str], str | None] = TOKENS.get,
    ) -> None:
        self.way, self.name = way, f"\0sapwood-test-{os.getpid()}-{time.monotonic_ns()}"
        sock = bind_unix(self.name) if way == "unix" else bind_tcp("127.0.0.1")
        tls = server_context(HERE / "server.cert.pem", HERE / "server.key.pem")
        self.listener = Listener(
            sock,
            token_of,
            serve,
            name="sapwood-test-listener",
            limits=LIMITS,
            tls=tls if way == "tls" else None,
        )

    def dial(self, token: str = TOKEN) -> Connection:
        if self.way == "unix":
            return dial_unix(self.name, token, timeout=20.0)
        tls = client_context(HERE / "server.cert.pem") if self.way == "tls" else None
        return dial_tcp("127.0.0.1", self.listener.port, token, timeout=20.0, tls=tls)

    def raw(self) -> socket.socket:
        if self.way == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self.name)
            except OSError:
                sock.close()
                raise
        else:
            sock = socket.create_connection(("127.0.0.1", self.listener.port))
        sock.settimeout(20.0)
        return sock


def exchange(connection: Connection, data: bytes = b"") -> bytes:
    connection.send({"nbytes": len(data)})
    connection.send_bytes(data)
    assert connection.receive()["nbytes"] == len(data)
    back = bytearray(len(data))
    connection.receive_into(back)
    return bytes(back)


def rest(sock: socket.socket) -> bytes:
    """What is said until the other side ends the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(65536):
            said += more
    return said


def framed(message: dict[str, str]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack("!I", len(body)) + body


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Trickle:
    """A socket whose other side sends a byte a second, and takes what it is sent at once."""

    family = socket.AF_UNIX

    def __init__(self, clock: Clock, data: bytes) -> None:
        self.clock, self.data, self.limit = clock, data, 0.0

    def settimeout(self, seconds: float) -> None:
        self.limit = seconds

    def recv_into(self, memory: memoryview) -> int:
        self.clock.now += min(1.0, self.limit)
        if self.limit < 1.0:
            raise TimeoutError("timed out")
        memory[:1], self.data = self.data[:1], self.data[1:]
        return 1

    def sendall(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass
