"""One pair's traffic through shared memory, moved on whenever its thread calls.

Small packets tell of it: ``WANT`` that a receive is posted, ``OFFER`` where the message lies, and
``TAKEN`` that it was copied; or, where the receiver cannot read the sender's memory, ``CHUNK`` that
a slot is filled, and ``FREE`` that it was copied out. A message is sent once it is wanted, so none
waits in the slots for a receive that others stand behind.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

import numpy as np

from sapwood.runtime.peer import peer_process
from sapwood.transport._message import MOST_PIECES, Message
from sapwood.transport._reads import ReadError, Span, read_memory, spans_of
from sapwood.transport._ring import SLOT_BYTES, SLOTS, Ring

__all__ = ["Pipe"]

_PACKET = struct.Struct("!BIqQI")  # kind, slot, tag, position, length
_SPAN = struct.Struct("!QQ")
_LONGEST = _PACKET.size + MOST_PIECES * _SPAN.size
_WANT, _CHUNK, _FREE, _OFFER, _TAKEN = 1, 2, 3, 4, 5
_NONE: list[Span] = []


class Pipe:
    """The messages between this process and one peer. Not for several threads."""

    def __init__(
        self, peer: int, wire: socket.socket, ours: Ring, theirs: Ring, *, is_read: bool
    ) -> None:
        """Take the connection and both rings, which ``close`` gives back.

        ``is_read``: the peer can read this process's memory.
        """
        wire.setblocking(False)
        self._is_read = is_read
        self._process, _ = peer_process(wire)
        self.wire = wire
        self.broken: str | None = None
        self._peer = peer
        self._ours, self._theirs = ours, theirs
        self._free = deque(range(SLOTS))
        self._sends: dict[int, Message] = {}
        self._receives: dict[int, Message] = {}
        self._wanted: dict[int, int] = {}
        self._ready: deque[Message] = deque()
        self._unread: dict[int, int] = {}
        """Bytes of each message that are in slots, or yet to be."""
        self._packets: deque[bytes] = deque()
        self._received: list[Message] = []

    def begin_send(self, message: Message) -> None:
        """Take a message to send."""
        if self._refused(message):
            return
        self._sends[message.tag] = message
        if message.tag in self._wanted:
            self._start(message, self._wanted.pop(message.tag))

    def begin_receive(self, message: Message) -> None:
        """Take a message to receive."""
        if self._refused(message):
            return
        self._receives[message.tag] = message
        self._tell(_WANT, 0, message.tag, 0, message.length)

    @property
    def stuffed(self) -> bool:
        """Whether packets wait until the other side reads."""
        return bool(self._packets)

    def read(self) -> None:
        """Take packets that came, and copy what they tell of, up to the end of a message."""
        for _ in range(4 * SLOTS):
            if self._received:
                return
            try:
                packet = self.wire.recv(_LONGEST)
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # told once, before the packets that are still there
            except OSError as error:
                self.fail(str(error))
                return
            if not packet:
                self.fail(f"process {self._peer} is gone")
                return
            spans = list(_SPAN.iter_unpack(packet[_PACKET.size :])) if _whole(packet) else []
            if not _whole(packet) or not self._take(spans, *_PACKET.unpack_from(packet)):
                self.fail(f"process {self._peer} sent what is no packet of a link")
                return

    def advance(self) -> None:
        """Fill free slots, and send what is to be told."""
        while self._ready and self._free:
            message = self._ready[0]
            if message.done:  # given up by whoever waited
                self.fail("a message was given up")
                return
            self._fill(message, self._free.popleft())
            if message.moved == message.length:
                self._ready.popleft()
        self._flush()

    def fail(self, why: str) -> None:
        """Fail all messages, now and later."""
        self.broken = self.broken or why
        for message in [*self._sends.values(), *self._receives.values(), *self._received]:
            message.finish(self.broken)
            message.release()
        for store in (self._sends, self._receives, self._wanted, self._ready, self._packets):
            store.clear()
        self._received = []

    def close(self) -> None:
        """Give everything back."""
        self.fail("the link is closed")
        self.wire.close()
        self._ours.close()
        self._theirs.close()

    def _refused(self, message: Message) -> bool:
        if self.broken is not None:
            message.finish(self.broken)
            message.release()
        return self.broken is not None

    def _start(self, message: Message, wanted: int) -> None:
        if wanted != message.length:
            why = f"it has {message.length} bytes, but {wanted} are expected"
            self.fail(f"message {message.tag}: {why}")
            return
        if self._is_read:
            spans = spans_of(message.pieces)
            self._tell(_OFFER, 0, message.tag, len(spans), message.length, spans)
            return
        self._unread[message.tag] = message.length
        self._ready.append(message)

    def _fill(self, message: Message, slot: int) -> None:
        length = min(SLOT_BYTES, message.length - message.moved)
        memory, at = self._ours.slot(slot, length), 0
        for part in message.parts(message.moved, length):
            np.copyto(memory[at : at + len(part)], part)
            at += len(part)
        self._tell(_CHUNK, slot, message.tag, message.moved, length)
        message.moved += length

    def _take(
        self, spans: list[Span], kind: int, slot: int, tag: int, position: int, length: int
    ) -> bool:
        if kind == _WANT:
            if (message := self._sends.get(tag)) is not None:
                self._start(message, length)
            else:
                self._wanted[tag] = length
            return True
        if kind == _OFFER:
            return self._read(tag, length, spans)
        if kind == _TAKEN:
            return self._taken(tag)
        if slot >= SLOTS or length > SLOT_BYTES:
            return False
        if kind == _CHUNK:
            return self._empty(slot, tag, position, length)
        return kind == _FREE and self._freed(slot, tag, length)

    def _empty(self, slot: int, tag: int, position: int, length: int) -> bool:
        message = self._receives.get(tag)
        if message is None or position + length > message.length:
            return False
        if message.done:  # whoever waited has given up, and its memory is not ours any more
            self.fail("a message was given up")
            return True
        memory, at = self._theirs.slot(slot, length), 0
        for part in message.parts(position, length):
            np.copyto(part, memory[at : at + len(part)])
            at += len(part)
        message.moved += length
        self._tell(_FREE, slot, tag, position, length)
        if message.moved == message.length:
            self._received.append(self._receives.pop(tag))
        return True

    def _read(self, tag: int, length: int, spans: list[Span]) -> bool:
        message = self._receives.get(tag)
        if message is None or not length == message.length == sum(size for _, size in spans):
            return False
        if message.done:
            self.fail("a message was given up")
            return True
        try:
            read_memory(self._process, spans, spans_of(message.pieces))
        except ReadError as error:
            self.fail(f"process {self._peer} is gone: {error}")
            return True
        self._tell(_TAKEN, 0, tag, 0, 0)
        self._received.append(self._receives.pop(tag))
        return True

    def _taken(self, tag: int) -> bool:
        message = self._sends.pop(tag, None)
        if message is None:
            return False
        message.release()
        message.finish()
        return True

    def _freed(self, slot: int, tag: int, length: int) -> bool:
        if tag not in self._unread or slot in self._free:
            return False
        self._free.append(slot)
        self._unread[tag] -= length
        if not self._unread[tag]:
            del self._unread[tag]
            message = self._sends.pop(tag)
            message.release()
            message.finish()
        return True

    def _tell(
        self, kind: int, slot: int, tag: int, position: int, length: int, spans: list[Span] = _NONE
    ) -> None:
        packet = _PACKET.pack(kind, slot, tag, position, length)
        self._packets.append(packet + b"".join(_SPAN.pack(*span) for span in spans))

    def _flush(self) -> None:
        try:
            while self._packets:
                self.wire.send(self._packets[0])
                self._packets.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._packets.clear()  # the end of the connection is read after what still came
        # Not before: whoever waited may close the link, and the sender would never know.
        for message in self._received:
            message.release()
            message.finish()
        self._received = []


def _whole(packet: bytes) -> bool:
    return len(packet) >= _PACKET.size and (len(packet) - _PACKET.size) % _SPAN.size == 0
