"""Messages between a rank and its node's engine: JSON with a length in front, and descriptors.

Whoever writes anything else, more than fits, or breaks off in the middle gets an error; nothing it
sent is run or unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sapwood.channel.descriptors import receive_with_fds
from sapwood.errors import CheckpointError
from sapwood.runtime.peer import peer_process

__all__ = ["MAX_BODY", "VERSION", "Closed", "Late", "Wire", "WireError"]

VERSION = 2
MAX_BODY = 64 * 2**20
"""The longest message: a plan of several hundred thousand tensors."""
MAX_FDS = 1
_HEADER = struct.Struct("!4sHHI")  # magic, version, descriptors, length of the body
_MAGIC = b"SWCE"
_TIME = struct.Struct("ll")


class WireError(CheckpointError):
    """The other side cannot be understood, or the connection broke."""


class Closed(WireError):
    """The other side has closed the connection, or ended."""


class Late(WireError):
    """The other side said nothing in time, or took nothing."""


class Wire:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, *, send_timeout: float) -> None:
        """``send_timeout``: seconds a message may wait for the other side to read."""
        sock.setblocking(True)
        self._sock = sock
        self._sending = threading.Lock()
        self._limit(socket.SO_SNDTIMEO, send_timeout)

    @property
    def peer(self) -> tuple[int, int]:
        """Process and user id of the other side, as the kernel knows them."""
        return peer_process(self._sock)

    def patience(self, seconds: float | None) -> None:
        """How long ``receive`` waits; None: until the connection is shut."""
        self._limit(socket.SO_RCVTIMEO, seconds or 0.0)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message and copies of some descriptors.

        Raises:
            WireError: the connection is gone, or the other side does not read; it is of no more
                use then, as part of the message may have gone out.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_BODY or len(fds) > MAX_FDS:
            raise WireError(f"a message of {len(body)} bytes and {len(fds)} descriptors is too big")
        data = memoryview(_HEADER.pack(_MAGIC, VERSION, len(fds), len(body)) + body)
        with self._sending:
            try:
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
                while sent < len(data):
                    sent += self._sock.send(data[sent:])
            except BlockingIOError as error:
                self.shut()
                raise Late("the other side does not read what it is sent") from error
            except ConnectionError as error:
                raise Closed(f"the other side is gone: {error.strerror or error}") from error
            except OSError as error:
                raise WireError(f"cannot send: {error.strerror or error}") from error

    def receive(self, limit: int = MAX_BODY) -> tuple[dict[str, Any], list[int]]:
        """The next message, and the descriptors that came with it, which are the caller's.

        Raises:
            Closed: there is no next message.
            WireError: what came is no message of ours.
        """
        fds: list[int] = []
        try:
            head = self._read(_HEADER.size, fds)
            magic, version, count, length = _HEADER.unpack(head)
            if magic != _MAGIC:
                raise WireError("this is not a message of a checkpoint engine")
            if version != VERSION:
                raise WireError(f"the other side speaks version {version}, expected {VERSION}")
            if length > limit or count != len(fds):
                raise WireError(f"a message of {length} bytes and {count} descriptors is refused")
            return _decoded(self._read(length, None)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def shut(self) -> None:
        """End the conversation, for both sides; whoever receives wakes up."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut and give the socket back; only the thread that receives may do so."""
        self.shut()
        self._sock.close()

    def _read(self, size: int, fds: list[int] | None) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            try:
                part = self._some(min(left, 2**20), fds)
            except BlockingIOError as error:
                raise Late("the other side did not answer in time") from error
            except ConnectionError as error:
                raise Closed(f"the other side is gone: {error.strerror or error}") from error
            except OSError as error:
                raise WireError(f"cannot receive: {error.strerror or error}") from error
            if not part:
                if fds is not None and left == size:
                    raise Closed("the other side closed the connection")
                raise WireError("the other side broke off in the middle of a message")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _some(self, size: int, fds: list[int] | None) -> bytes:
        if fds is None:
            return self._sock.recv(size)  # the kernel drops descriptors nobody asked for
        part, more, dropped = receive_with_fds(self._sock, size, MAX_FDS)
        fds += more
        if dropped or len(fds) > MAX_FDS:
            raise WireError("a message came with more descriptors than it may have")
        return part

    def _limit(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        value = _TIME.pack(whole, int((seconds - whole) * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, option, value)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise WireError("a message does not say what it is about")
    return message
