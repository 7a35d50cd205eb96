"""What ranks of one machine tell each other while they average: fixed-size messages, in order.

The messages are also what orders memory: whoever has received one sees everything its sender wrote
before sending it, on every processor, because both went through the kernel. So no flag or counter
is kept in shared memory.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from dataclasses import dataclass

from sapwood.channel.descriptors import receive_with_fds

__all__ = ["Kind", "Message", "receive", "send"]

_FORM = struct.Struct("<BxxxIIIQ")
_MAX_DESCRIPTORS = 1


class Kind(enum.IntEnum):
    """What a message says."""

    CONTRIBUTION = 1
    """Comes with a descriptor: the sender's memory for a new layout."""
    RESULT = 2
    """Comes with a descriptor: the memory for the averages, from the machine's first rank."""
    POSTED = 3
    """The sender's contribution to a bucket is complete."""
    SUMMED = 4
    """The sender's slice of a bucket's average is complete."""
    LEAVING = 5
    """The sender ends its part in the run; the connection will close."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``layout`` tells late messages of an old layout from those of the new one."""

    kind: Kind
    layout: int = 0
    bucket: int = 0
    lane: int = 0
    round: int = 0
    descriptor: int = -1


def send(link: socket.socket, message: Message) -> None:
    """Send a message at once.

    Raises:
        BlockingIOError: the other end has too many unread ones.
        OSError: the other end is gone.
    """
    raw = _FORM.pack(message.kind, message.layout, message.bucket, message.lane, message.round)
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    if message.descriptor >= 0:
        socket.send_fds(link, [raw], [message.descriptor], flags)
    else:
        link.send(raw, flags)


def receive(link: socket.socket) -> Message:
    """The next message that is there.

    Raises:
        BlockingIOError: none is there.
        EOFError: the other end is gone.
    """
    raw, descriptors, _ = receive_with_fds(
        link, _FORM.size + 1, _MAX_DESCRIPTORS, socket.MSG_DONTWAIT
    )
    if not raw:
        raise EOFError
    try:
        kind, layout, bucket, lane, turn = _FORM.unpack(raw)
        descriptor = descriptors[0] if descriptors else -1
        return Message(Kind(kind), layout, bucket, lane, turn, descriptor)
    except (struct.error, ValueError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("a message of an unknown form arrived") from None
