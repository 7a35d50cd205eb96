"""The thread that moves a link's messages through shared memory."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Mapping, Set

from sapwood.errors import TransportError
from sapwood.transport._message import Message
from sapwood.transport._pipe import Pipe
from sapwood.transport._reads import Permission
from sapwood.transport._ring import Ring
from sapwood.transport.base import Data

__all__ = ["Pump", "PumpLink"]

# The thread copies one ring at most between two looks at whether it should end.
_JOIN_TIMEOUT = 5.0
_Order = tuple[bool, Message]


class Pump:
    """Owns the pairs' connections and memory, and the thread that serves them."""

    def __init__(
        self,
        wires: Mapping[int, socket.socket],
        rings: Mapping[int, tuple[Ring, Ring]],
        readers: Set[int],
        permission: Permission,
    ) -> None:
        """Take them all and start; ``close`` ends it. ``readers`` can read this process."""
        self._permission = permission
        self._pipes = {
            peer: Pipe(peer, wire, *rings[peer], is_read=peer in readers)
            for peer, wire in wires.items()
        }
        self._orders: deque[_Order] = deque()
        self._lock = threading.Lock()
        self._stop: str | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for pipe in self._pipes.values():
            self._selector.register(pipe.wire, selectors.EVENT_READ, pipe)
        self._thread = threading.Thread(target=self._loop, name="sapwood-link", daemon=True)
        self._thread.start()

    def begin(self, message: Message, *, send: bool) -> None:
        """Hand a message to the thread."""
        with self._lock:
            if self._stop is not None:
                raise TransportError(f"memory: {self._stop}; open another link")
            if message.peer not in self._pipes:
                raise TransportError(f"memory: process {message.peer} is not of the other side")
            self._orders.append((send, message))
            os.eventfd_write(self._wake, 1)

    def stop(self, why: str) -> None:
        """Make the thread end, failing all that is under way."""
        with self._lock:
            if self._stop is None:
                self._stop = why
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread."""
        self.stop("the link is closed")
        self._thread.join(_JOIN_TIMEOUT)

    def _loop(self) -> None:
        try:
            while self._stop is None:
                for key, _ in self._selector.select():
                    if key.data is None:
                        os.eventfd_read(self._wake)
                    else:
                        key.data.read()
                self._take_orders()
                for pipe in self._pipes.values():
                    pipe.advance()
                    self._watch(pipe)
        except BaseException as error:
            self.stop(f"its thread failed: {error!r}")
            raise
        finally:
            self._end()

    def _take_orders(self) -> None:
        while self._orders:
            send, message = self._orders.popleft()
            pipe = self._pipes[message.peer]
            (pipe.begin_send if send else pipe.begin_receive)(message)

    def _watch(self, pipe: Pipe) -> None:
        if pipe.broken is not None:
            if pipe.wire in self._selector.get_map():
                self._selector.unregister(pipe.wire)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pipe.stuffed else 0)
        if self._selector.get_key(pipe.wire).events != wanted:
            self._selector.modify(pipe.wire, wanted, pipe)

    def _end(self) -> None:
        self._selector.close()
        why = self._stop or "the link is closed"
        for pipe in self._pipes.values():
            pipe.fail(why)
            pipe.close()
        with self._lock:
            for _, message in self._orders:
                message.finish(why)
            self._orders.clear()
            os.close(self._wake)
        self._permission.give_back()


class PumpLink:
    """One process's end of a transfer through shared memory."""

    gathers = True

    def __init__(self, name: str, pump: Pump) -> None:
        """``name`` as in settings."""
        self.name = name
        self._pump = pump

    def send(self, peer: int, tag: int, data: Data) -> Message:
        """Begin to send; done when the receiver has it."""
        return self._begin(peer, tag, data, send=True)

    def recv(self, peer: int, tag: int, data: Data) -> Message:
        """Begin to receive."""
        return self._begin(peer, tag, data, send=False)

    def close(self) -> None:
        """End the thread, the connections and the memory."""
        self._pump.close()

    def _begin(self, peer: int, tag: int, data: Data, *, send: bool) -> Message:
        message = Message(self.name, peer, tag, data)
        message.expired = self._pump.stop
        if not message.done:
            self._pump.begin(message, send=send)
        return message
