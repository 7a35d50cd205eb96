"""One end of a connection: JSON messages, raw bytes, and descriptors over a Unix socket.

A message is four bytes of length and that much JSON. Where a message announces bytes, exactly that
many follow, outside the JSON. Descriptors travel with the message that announces them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sapwood.channel.descriptors import receive_with_fds

__all__ = ["BLOCK_BYTES", "MESSAGE_LIMIT", "ChannelError", "Connection", "Ended"]

BLOCK_BYTES = 2**20
"""Bytes are sent and received this many at a time, each block within the timeout."""
MESSAGE_LIMIT = 64 * 2**10
"""A longer message is not one of ours, unless the receiver expects more."""
_LENGTH = struct.Struct("!I")
_SENDFILE = 16 * BLOCK_BYTES
_VECTORS = 512
"""Buffers in one system call; the kernel takes up to 1024."""


class ChannelError(OSError):
    """The other side ended the connection, or said something that is not of this protocol."""


class Ended(ChannelError):
    """The other side ended the connection."""


class Connection:
    """One end of a connection. Every call raises ``OSError`` if the other side is gone.

    It is gone when a block takes longer than ``timeout`` seconds: a long transfer may take its
    time, but nobody is held up by one byte now and then. ``within`` limits all of an exchange.

    Owned by one thread at a time; only ``abort`` may be called by another.
    """

    def __init__(self, sock: socket.socket, *, timeout: float) -> None:
        """The socket is this object's from now on."""
        self.timeout = timeout
        self.key = ""
        """Which token the other side has proven to know: the handshake's ``key_of`` it."""
        self._sock = sock
        self._end: float | None = None
        self._fds: list[int] = []
        self._fd_limit = 0
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- messages ----------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message; ``fds`` are duplicated into the other process (Unix sockets only)."""
        body = json.dumps(message, separators=(",", ":")).encode()
        head = _LENGTH.pack(len(body))
        if fds:
            self._allow(self._deadline())
            socket.send_fds(self._sock, [head], list(fds))
            head = b""
        self.send_bytes(head + body)

    def receive(
        self, *, limit: int = MESSAGE_LIMIT, timeout: float | None = None
    ) -> dict[str, Any]:
        """The next message; ``timeout`` is how long it may take to begin."""
        if timeout is not None and not self._readable(self._at_most(timeout)):
            raise TimeoutError(f"nothing was said for {timeout:g} s")
        head = bytearray(_LENGTH.size)
        self._receive_head(head)
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > limit:
            raise ChannelError(
                f"a message of {nbytes} bytes was announced, at most {limit} are taken"
            )
        body = bytearray(nbytes)
        self.receive_into(body)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise ChannelError("a message is not JSON") from None
        if not isinstance(message, dict):
            raise ChannelError("a message is not a JSON object")
        return message

    def allow_fds(self, count: int) -> None:
        """Take up to ``count`` descriptors with each message; before, the kernel drops them."""
        self._fd_limit = count if self.passes_fds else 0

    @property
    def passes_fds(self) -> bool:
        """Whether descriptors can be passed: both ends are on one machine."""
        return self._sock.family == socket.AF_UNIX

    def take_fds(self) -> list[int]:
        """The descriptors of the last message; they are the caller's to close."""
        taken, self._fds = self._fds, []
        return taken

    def _receive_head(self, head: bytearray) -> None:
        self._drop_fds()
        if not self._fd_limit:
            self._fill(memoryview(head))
            return
        self._allow(self._deadline())
        data, self._fds, _ = receive_with_fds(self._sock, len(head), self._fd_limit)
        if not data:
            raise Ended("the other side ended the connection")
        head[: len(data)] = data
        if len(data) < len(head):
            self._fill(memoryview(head)[len(data) :])

    def _drop_fds(self) -> None:
        for fd in self.take_fds():
            os.close(fd)

    # -- bytes -------------------------------------------------------------------------------

    def send_bytes(self, data: Any) -> None:
        """Send raw bytes, a block at a time, such that a slow link is not taken for a dead one."""
        memory = memoryview(data).cast("B")
        for start in range(0, len(memory), BLOCK_BYTES):
            self._allow(self._deadline())
            self._sock.sendall(memory[start : start + BLOCK_BYTES])

    def send_gathered(self, parts: Sequence[Any]) -> None:
        """Send several buffers as if they were one, without copying them together."""
        pending = [part for data in parts if (part := memoryview(data).cast("B"))]
        if isinstance(self._sock, ssl.SSLSocket):  # it has no sendmsg
            for part in pending:
                self.send_bytes(part)
            return
        pending.reverse()
        while pending:
            batch = pending[: -_VECTORS - 1 : -1]
            self._allow(self._deadline())
            sent = self._sock.sendmsg(batch)
            while sent and pending:
                first = pending.pop()
                if sent < len(first):
                    pending.append(first[sent:])
                    break
                sent -= len(first)

    def send_file(self, file: Any, start: int, nbytes: int) -> None:
        """Send a part of a file without taking it into memory."""
        self._allow(self._deadline())
        if nbytes and self._sock.sendfile(file, start, nbytes) != nbytes:
            raise ChannelError("a file became shorter while it was sent")

    def send_range(self, fd: int, start: int, nbytes: int) -> None:
        """Send a part of a file or of shared memory, by its descriptor, without copying it here."""
        end = start + nbytes
        if isinstance(self._sock, ssl.SSLSocket):  # it encrypts what it sends
            while start < end:
                data = os.pread(fd, min(BLOCK_BYTES, end - start), start)
                if not data:
                    raise ChannelError("a file became shorter while it was sent")
                self.send_bytes(data)
                start += len(data)
            return
        deadline = self._deadline()
        while start < end:
            self._allow(deadline)  # which makes the socket one that does not block
            try:
                sent = os.sendfile(self._sock.fileno(), fd, start, min(_SENDFILE, end - start))
            except BlockingIOError:
                self._wait_writable(deadline)
                continue
            if not sent:
                raise ChannelError("a file became shorter while it was sent")
            start, deadline = start + sent, self._deadline()

    def _wait_writable(self, deadline: float) -> None:
        waiting = select.poll()
        waiting.register(self._sock, select.POLLOUT)
        if not waiting.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            raise TimeoutError("the other side is too slow")

    def receive_scattered(self, parts: Sequence[Any]) -> None:
        """Fill several buffers as if they were one."""
        pending = [part for out in parts if (part := memoryview(out).cast("B"))]
        if isinstance(self._sock, ssl.SSLSocket):  # it has no recvmsg
            for part in pending:
                self.receive_into(part)
            return
        pending.reverse()
        deadline, received = self._deadline(), 0
        while pending:
            self._allow(deadline)
            count, *_ = self._sock.recvmsg_into(pending[: -_VECTORS - 1 : -1])
            if not count:
                raise Ended("the other side ended the connection")
            received += count
            if received >= BLOCK_BYTES:
                deadline, received = self._deadline(), 0
            while count and pending:
                first = pending.pop()
                if count < len(first):
                    pending.append(first[count:])
                    break
                count -= len(first)

    def receive_into(self, out: Any) -> None:
        """Fill a buffer with raw bytes."""
        memory = memoryview(out).cast("B")
        for start in range(0, len(memory), BLOCK_BYTES):
            self._fill(memory[start : start + BLOCK_BYTES])

    def _fill(self, memory: memoryview) -> None:
        deadline = self._deadline()
        while memory:
            self._allow(deadline)  # not the whole timeout again for each byte that comes
            count = self._sock.recv_into(memory)
            if not count:
                raise Ended("the other side ended the connection")
            memory = memory[count:]

    def _deadline(self) -> float:
        """By when the next block must be over."""
        return time.monotonic() + self._at_most(self.timeout)

    def _at_most(self, seconds: float) -> float:
        return seconds if self._end is None else min(seconds, self._end - time.monotonic())

    def _allow(self, deadline: float) -> None:
        """Let the next system call take until ``deadline``."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side is too slow")
        self._sock.settimeout(left)

    def _readable(self, timeout: float) -> bool:
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        waiting = select.poll()  # select() cannot do this where a process has many files open
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(max(timeout, 0.0) * 1000))

    # -- the beginning and the end -----------------------------------------------------------

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that is said inside must be over ``seconds`` from now, however it is cut up."""
        before, end = self._end, time.monotonic() + seconds
        self._end = end if before is None else min(before, end)
        try:
            yield
        finally:
            self._end = before

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages and limits: an address, or "" on this machine."""
        try:
            name = self._sock.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def stale(self) -> bool:
        """Whether an idle connection cannot be used again: it was ended, or something is left."""
        return self._readable(0)

    def abort(self) -> None:
        """End it from another thread: whoever waits on it is woken."""
        with suppress(OSError):
            # Not SSLSocket's own method, which takes the TLS state away under the other thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; calling it again does nothing."""
        self._drop_fds()
        self._sock.close()
