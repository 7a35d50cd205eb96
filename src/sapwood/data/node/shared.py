"""The engine that every rank of a host has when one of them reads for all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from time import perf_counter_ns

from sapwood.buffers.arena import Arena
from sapwood.data.engines.base import Bytes, Engine, Ints, Job
from sapwood.data.node.place import Node
from sapwood.data.node.serve import Server
from sapwood.data.node.wire import FAILED, PLACED, USED, connect, receive
from sapwood.errors import DataError

__all__ = ["Shared"]


class Shared:
    """Get records from the process of this host that reads, which may be this one.

    The ranks of a host take their batches from a few slots, so that they go along together; the one
    that reads is ahead of the slowest by as many.
    """

    name = "shared"

    def __init__(
        self,
        job: Job,
        node: Node,
        rank: int,
        make: Callable[[Job], Engine],
        parts: Callable[[Sequence[int]], Iterator[list[Ints]]],
    ) -> None:
        """``make`` gives the engine that reads; the others are as for ``Server``."""
        self._job, self._node, self._rank = job, node, rank
        self._make, self._parts = make, parts

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        job, slots = self._job, dict[int, Arena]()
        with ExitStack() as stack:
            wire, server = self._join(stack)
            stack.callback(_close, slots)
            for records in wanted:
                with job.recorder.waiting():
                    number, slot, at, nbytes = self._next(wire, slots)
                needed = int(job.places(records)[1].sum())
                if nbytes != needed:
                    raise DataError(
                        f"expected {needed} bytes of records, and the rank that reads gave "
                        f"{nbytes}; are all ranks of this host at the same batch?"
                    )
                start = perf_counter_ns()
                data = slots[slot].bytes[at : at + nbytes].copy()
                job.recorder.stats.gather_seconds += (perf_counter_ns() - start) / 1e9
                with suppress(OSError):  # the next message, or its absence, tells what happened
                    wire.send(USED.pack(number))
                yield data
            if server is not None:
                server.finish()

    def _join(self, stack: ExitStack) -> tuple[socket.socket, Server | None]:
        node, timeout = self._node, self._job.settings.timeout
        if node.leads:
            job = replace(self._job, recorder=self._job.recorder.helper())
            server = Server(job, node, self._rank, self._make, self._parts)
            stack.enter_context(closing(server))
            return server.wire, server
        return stack.enter_context(connect(node.address, self._rank, timeout)), None

    def _next(self, wire: socket.socket, slots: dict[int, Arena]) -> tuple[int, int, int, int]:
        message, fd = receive(wire)
        number, slot, at, nbytes = PLACED.unpack_from(message)
        if number == FAILED:
            why = message[PLACED.size :].decode(errors="replace")
            raise DataError(f"the rank of this host that reads for the others failed: {why}")
        if fd is not None:
            if slot in slots:
                slots[slot].close()
            slots[slot] = Arena.attach(fd)
        return number, slot, at, nbytes


def _close(slots: dict[int, Arena]) -> None:
    for arena in slots.values():
        arena.close()
