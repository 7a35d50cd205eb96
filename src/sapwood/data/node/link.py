"""What one rank has of the process that reads for it: a wire, and memory that both see."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress
from time import monotonic, perf_counter_ns
from typing import NamedTuple

from sapwood.buffers.arena import Arena
from sapwood.data.engines.base import Bytes
from sapwood.data.node.serve import Server
from sapwood.data.node.wire import FAILED, PLACED, USED, WAITING, receive
from sapwood.errors import DataError

__all__ = ["Link", "Placed"]


class Placed(NamedTuple):
    """Where a batch is."""

    number: int
    slot: int
    at: int
    nbytes: int
    skew_ns: int


class Link:
    """The connection to one reading process, which may be this one: then there is a server."""

    def __init__(
        self,
        wire: socket.socket,
        leader: int,
        here: Collection[int],
        server: Server | None,
        *,
        timeout: float,
    ) -> None:
        """``here`` are the members that read along, as far as is known."""
        self.leader, self.here = leader, frozenset(here)
        self._wire, self._server, self._timeout = wire, server, timeout
        self._slots: dict[int, Arena] = {}

    def next(self) -> Placed:
        """Wait for the next batch.

        Raises:
            DataError: it could not be read.
            DeadlineError: it did not come in time.
            PeerFailed: the process that reads is gone.
        """
        deadline, late = monotonic() + self._timeout, ""
        while True:
            message, fd = receive(self._wire, deadline, self._timeout, late)
            placed, rest = Placed(*PLACED.unpack_from(message)), message[PLACED.size :]
            if placed.number != WAITING:
                break
            late = rest.decode(errors="replace")
        if placed.number == FAILED:
            why = rest.decode(errors="replace")
            raise DataError(f"the rank of this host that reads for the others failed: {why}")
        if fd is not None:
            if placed.slot in self._slots:
                self._slots[placed.slot].close()
            self._slots[placed.slot] = Arena.attach(fd)
        mask = int.from_bytes(rest, "little")
        self.here = frozenset(one for one in range(mask.bit_length()) if mask >> one & 1)
        return placed

    def copy(self, placed: Placed) -> Bytes:
        """The records of a batch, in memory of their own; their slot is free from then on."""
        part = self._slots[placed.slot].bytes[placed.at : placed.at + placed.nbytes]
        data: Bytes = part.copy()
        with suppress(OSError):  # the next message, or its absence, tells what happened
            self._wire.send(USED.pack(placed.number, perf_counter_ns()))
        return data

    def finish(self) -> None:
        """Wait until the others have got what this process has read for them."""
        if self._server is not None:
            self._server.finish()

    def close(self) -> None:
        """Let go of the process that reads, or end reading."""
        if self._server is not None:
            self._server.close()
        self._wire.close()
        for arena in self._slots.values():
            arena.close()
