"""What is said between the process that reads and the others of its host."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sapwood.channel.descriptors import receive_with_fds
from sapwood.errors import DeadlineError, PeerFailed
from sapwood.runtime.peer import peer_process

__all__ = [
    "FAILED",
    "PLACED",
    "USED",
    "WAITING",
    "Hello",
    "accept",
    "connect",
    "listen",
    "receive",
]

PLACED = struct.Struct("<qqqqq")
"""A batch is in memory: its number, the slot, and where in it the records of the receiver are; and
how many nanoseconds the receiver has had its batches before the last of all had them. The rest of
the message says which members are there."""
USED = struct.Struct("<qq")
"""The number of a batch whose slot the sender needs no more, and when it had copied it."""
FAILED = -1
"""Instead of a number: reading failed, and the rest of the message says why."""
WAITING = -2
"""Instead of a number: the next batch has to wait, and the rest of the message says for whom."""
LONGEST = 4096
_PAUSE = 0.01
_HELLO = struct.Struct("<qqq")


class Hello(NamedTuple):
    """What one who connects says first."""

    rank: int
    local: int
    first: int
    """The number of the batch it needs next."""


def listen(address: str, backlog: int) -> socket.socket:
    """Wait for others at a name.

    Raises:
        OSError: somebody does already.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.bind(address)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def accept(listening: socket.socket, deadline: float) -> tuple[Hello, socket.socket]:
    """The next of our own processes that connects, and what it says.

    Raises:
        DeadlineError: none did in time.
    """
    while True:
        listening.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            made, _ = listening.accept()
        except TimeoutError:
            raise DeadlineError("no other rank of this host began to read") from None
        made.settimeout(max(deadline - time.monotonic(), 0.001))
        if not _ours(made):
            made.close()
            continue
        with suppress(TimeoutError, OSError):
            hello = made.recv(_HELLO.size)
            if len(hello) == _HELLO.size:
                return Hello(*_HELLO.unpack(hello)), made
        made.close()


def connect(address: str, hello: Hello, timeout: float) -> socket.socket:
    """Reach the process that reads, which may not have begun yet.

    Raises:
        DeadlineError: it was not there in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(timeout)
        try:
            made.connect(address)
            if _ours(made):
                made.send(_HELLO.pack(*hello))
                return made
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            pass
        made.close()
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the rank of this host that reads for the others was not there in {timeout:g} s; "
                "do all ranks iterate over the reader, the same number of times?"
            )
        time.sleep(_PAUSE)


def receive(
    wire: socket.socket, deadline: float, timeout: float, late: str = ""
) -> tuple[bytes, int | None]:
    """A message, and the descriptor that came with it.

    ``late`` is what the reading process has said about who keeps it from going on.

    Raises:
        DeadlineError: none came in time.
        PeerFailed: the other side is gone.
    """
    wire.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        data, fds, _ = receive_with_fds(wire, LONGEST, 1)
    except TimeoutError:
        # What it said before it was stopped itself is no longer the reason.
        if late and not _stopped(wire):
            text = f"no batch in {timeout:g} s: {late}"
        else:
            text = f"the rank of this host that reads for the others gave no batch in {timeout:g} s"
        raise DeadlineError(f"{text}: it is stopped, or further behind than that") from None
    except OSError as error:
        raise PeerFailed(
            f"the rank of this host that reads for the others died or left: {error}"
        ) from error
    if not data:
        raise PeerFailed("the rank of this host that reads for the others died or left")
    return data, fds[0] if fds else None


def _ours(wire: socket.socket) -> bool:
    """Any user of the host may connect to such a name, and only our own processes may read."""
    return peer_process(wire)[1] == os.getuid()


def _stopped(wire: socket.socket) -> bool:
    """Whether the process at the other end is stopped by a signal or a debugger."""
    pid, _ = peer_process(wire)
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return facts.rpartition(")")[2].split()[:1] in (["T"], ["t"])
