"""What all transports need while they open: values of the other processes, in time."""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from sapwood.errors import TransportError
from sapwood.runtime.stores import Store
from sapwood.transport.base import Ends

__all__ = ["BACKLOG", "HELLO", "Deadline", "accept", "exchange", "late", "publish", "read"]

HELLO = struct.Struct("!I32s")
"""What a receiver says to a donor first: its number, and the donor's token."""
BACKLOG = 1024
"""Also strangers wait there, until all processes have come."""
_STRANGERS = 256
"""Connections that have not shown the token yet, beside those of all processes."""
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


def accept(
    listener: socket.socket,
    token: bytes,
    ends: Ends,
    deadline: Deadline,
    wires: dict[int, socket.socket],
    check: Callable[[socket.socket], None] = lambda wire: None,
) -> None:
    """Let every peer in that knows the token, and nobody else; ``check`` may refuse one.

    All are heard at once, so that a stranger who keeps silent keeps nobody waiting; of too many the
    one that came first loses its place.

    Raises:
        TimeoutError: not all came in time.
    """
    listener.setblocking(False)
    told: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(wires) < len(ends.peers):
                ready = selector.select(deadline.left)
                if not ready and not deadline.left:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is listener:
                        _welcome(listener, selector, told, ends)
                        continue
                    wire = cast(socket.socket, key.fileobj)
                    if wire not in told or not _heard(wire, told):  # displaced, or not yet done
                        continue
                    word = told.pop(wire)
                    selector.unregister(wire)
                    number = _known(word, token, ends, wires)
                    if number is None:
                        wire.close()
                        continue
                    wires[number] = wire
                    wire.setblocking(True)
                    check(wire)
        finally:
            for stranger in told:
                stranger.close()


def _welcome(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    told: dict[socket.socket, bytes],
    ends: Ends,
) -> None:
    try:
        wire, _ = listener.accept()
    except OSError:  # it is gone again, or there are no more descriptors, which passes
        time.sleep(_FIRST_PAUSE)
        return
    wire.setblocking(False)
    if len(told) >= _STRANGERS + ends.size:
        oldest = next(iter(told))
        del told[oldest]
        selector.unregister(oldest)
        oldest.close()
    told[wire] = b""
    selector.register(wire, selectors.EVENT_READ)


def _heard(wire: socket.socket, told: dict[socket.socket, bytes]) -> bool:
    """Take what one says; whether it has said all, or hung up."""
    more = b""
    with suppress(OSError):
        more = wire.recv(HELLO.size - len(told[wire]))
    told[wire] += more
    return not more or len(told[wire]) == HELLO.size


def _known(word: bytes, token: bytes, ends: Ends, wires: Mapping[int, socket.socket]) -> int | None:
    """The number of a peer that knows the token; None for a stranger."""
    number, shown = HELLO.unpack(word) if len(word) == HELLO.size else (-1, b"")
    if hmac.compare_digest(shown, token) and number in ends.peers and number not in wires:
        return int(number)
    return None
