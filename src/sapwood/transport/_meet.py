"""What all transports need while they open: values of the other processes, in time."""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sapwood.errors import TransportError
from sapwood.runtime.stores import Store
from sapwood.transport.base import Ends

__all__ = ["HELLO", "Deadline", "accept", "exchange", "late", "one_host", "publish", "read"]

HELLO = struct.Struct("!I32s")
"""What a receiver says to a donor first: its number, and the donor's token."""
_HELLO_TIMEOUT = 2.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05


class Deadline:
    """A moment in the future."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` from now."""
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())


def late(name: str, who: object, seconds: float) -> TransportError:
    """The error that tells of processes that did not come."""
    return TransportError(
        f"{name}: {who} did not come to the transfer within {seconds:g} s; it is late, stopped, or "
        "has given up: see its own log, and try again"
    )


def publish(store: Store, key: str, value: Any) -> None:
    """Write ``value`` as JSON."""
    store.set(key, json.dumps(value))


def read(store: Store, key: str, deadline: Deadline) -> Any:
    """What another process has published; None when it did not in time.

    The store is asked rather than waited on: its own wait cannot be left by a closing link.
    """
    pause = _FIRST_PAUSE
    while True:
        if store.check([key]):
            return json.loads(store.get(key))
        if not (left := deadline.left):
            return None
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LAST_PAUSE)


def exchange(name: str, store: Store, ends: Ends, mine: Any, deadline: Deadline) -> list[Any]:
    """Give every process ``mine`` and get theirs, by number."""
    publish(store, f"{name}/at/{ends.me}", mine)
    found = []
    for number in range(ends.size):
        value = read(store, f"{name}/at/{number}", deadline)
        if value is None:
            raise late(name, f"process {number} on {ends.hosts[number]}", ends.timeout)
        found.append(value)
    return found


def one_host(hosts: Sequence[str]) -> bool:
    """Whether all processes are on one machine."""
    return len(set(hosts)) == 1


def accept(
    listener: socket.socket,
    token: bytes,
    ends: Ends,
    deadline: Deadline,
    wires: dict[int, socket.socket],
    check: Callable[[socket.socket], None] = lambda wire: None,
) -> None:
    """Let every peer in that knows the token, and nobody else; ``check`` may refuse one.

    Raises:
        TimeoutError: not all came in time.
    """
    while len(wires) < len(ends.peers):
        listener.settimeout(deadline.left or 0.001)
        wire, _ = listener.accept()
        told = b""
        with suppress(OSError):  # a stranger, or one that died; ours come until the deadline
            wire.settimeout(min(deadline.left, _HELLO_TIMEOUT) or 0.001)
            while len(told) < HELLO.size and (more := wire.recv(HELLO.size - len(told))):
                told += more
        number, word = HELLO.unpack(told) if len(told) == HELLO.size else (-1, b"")
        if hmac.compare_digest(word, token) and number in ends.peers and number not in wires:
            wires[number] = wire
            check(wire)
        else:
            wire.close()
