"""How processes on different machines talk: small JSON messages, then raw bytes.

A message is four bytes of length and that much JSON. Where a message announces bytes, exactly that
many follow. A connection begins with both sides proving that they know the token, by a keyed hash
of two random numbers; the token itself is never sent. That keeps strangers out; it does not hide
what is sent, nor protect it from somebody who can change it on its way: use a network you trust.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["BLOCK_BYTES", "Connection", "Refused", "WireError"]

PROTOCOL = "sapwood-peer/1"
BLOCK_BYTES = 2**20
"""Bytes are received and written this many at a time."""
MESSAGE_LIMIT = 64 * 2**10
"""A longer message is not one of ours."""
HELLO_LIMIT = 1024
"""The same, for somebody who has not shown the token yet."""
_LENGTH = struct.Struct("!I")


class WireError(OSError):
    """The other side ended the connection, or said something that is not of this protocol."""


class Refused(WireError):
    """One side does not know the token."""


class Connection:
    """One end of a connection. Every call raises ``OSError`` if the other side is gone.

    It is gone when nothing goes on for ``timeout`` seconds, or when a block takes longer than that:
    a long transfer may take its time, but nobody is held up by one byte now and then.
    """

    def __init__(self, sock: socket.socket, *, timeout: float) -> None:
        """The socket is this object's from now on."""
        self.timeout = timeout
        self._sock = sock
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- messages and bytes ------------------------------------------------------------------

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(_LENGTH.pack(len(body)) + body)

    def receive(
        self, *, limit: int = MESSAGE_LIMIT, timeout: float | None = None
    ) -> dict[str, Any]:
        """The next message; ``timeout`` is how long it may take to begin."""
        head = bytearray(_LENGTH.size)
        if timeout is not None and not self._readable(timeout):
            raise TimeoutError(f"nothing was said for {timeout:g} s")
        self.receive_into(head)
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > limit:
            raise WireError(f"a message of {nbytes} bytes was announced, at most {limit} are taken")
        body = bytearray(nbytes)
        self.receive_into(body)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise WireError("a message is not JSON") from None
        if not isinstance(message, dict):
            raise WireError("a message is not a JSON object")
        return message

    def send_bytes(self, data: Any) -> None:
        """Send raw bytes, a block at a time, such that a slow link is not taken for a dead one."""
        memory = memoryview(data).cast("B")
        for start in range(0, len(memory), BLOCK_BYTES):
            self._sock.sendall(memory[start : start + BLOCK_BYTES])

    def send_file(self, file: Any, start: int, nbytes: int) -> None:
        """Send a part of a file without taking it into memory."""
        if nbytes and self._sock.sendfile(file, start, nbytes) != nbytes:
            raise WireError("a file became shorter while it was sent")

    def receive_into(self, out: Any) -> None:
        """Fill a buffer with raw bytes."""
        memory = memoryview(out).cast("B")
        for start in range(0, len(memory), BLOCK_BYTES):
            self._fill(memory[start : start + BLOCK_BYTES])

    def _fill(self, memory: memoryview) -> None:
        deadline = time.monotonic() + self.timeout
        while memory:
            count = self._sock.recv_into(memory)
            if not count:
                raise WireError("the other side ended the connection")
            memory = memory[count:]
            if memory and time.monotonic() > deadline:
                raise TimeoutError("a block came too slowly")

    def _readable(self, timeout: float) -> bool:
        waiting = select.poll()  # select() cannot do this where a process has many files open
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(timeout * 1000))

    # -- the beginning and the end ------------------------------------------------------------

    def accept_from(self, token: str) -> None:
        """The server's side of the greeting.

        Raises:
            Refused: the client does not know the token.
        """
        mine = secrets.token_hex(16)
        self.send({"protocol": PROTOCOL, "nonce": mine})
        answer = self.receive(limit=HELLO_LIMIT)
        theirs = str(answer.get("nonce", ""))
        if not _proven(token, "client", mine, theirs, answer):
            self.send({"error": "wrong token"})
            raise Refused("it does not know the token")
        self.send({"proof": _proof(token, "server", mine, theirs)})

    def introduce(self, token: str) -> None:
        """The client's side of the greeting.

        Raises:
            Refused: the server does not take the token, or does not know it itself.
        """
        hello = self.receive(limit=HELLO_LIMIT)
        if "error" in hello:
            raise WireError(str(hello["error"]))
        if hello.get("protocol") != PROTOCOL:
            raise WireError(f"it speaks {hello.get('protocol')!r}, not {PROTOCOL!r}")
        theirs, mine = str(hello.get("nonce", "")), secrets.token_hex(16)
        self.send({"nonce": mine, "proof": _proof(token, "client", theirs, mine)})
        answer = self.receive(limit=HELLO_LIMIT)
        if "error" in answer:
            raise Refused(f"it refused us: {answer['error']}")
        if not _proven(token, "server", theirs, mine, answer):
            raise Refused("it does not know the token itself")

    @property
    def stale(self) -> bool:
        """Whether an idle connection cannot be used again: it was ended, or something is left."""
        return self._readable(0)

    def abort(self) -> None:
        """End it from another thread: whoever waits on it is woken."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; calling it again does nothing."""
        self._sock.close()


def _proof(token: str, side: str, server: str, client: str) -> str:
    text = f"{PROTOCOL} {side} {server} {client}"
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _proven(token: str, side: str, server: str, client: str, answer: Mapping[str, Any]) -> bool:
    expected = _proof(token, side, server, client).encode()
    return hmac.compare_digest(expected, str(answer.get("proof", "")).encode())
