"""The engine that every rank of a host has when one of them reads for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from time import perf_counter_ns

from sapwood.data.engines.base import Bytes, Engine, Ints, Job
from sapwood.data.node.link import Link, Placed
from sapwood.data.node.place import Node
from sapwood.data.node.serve import Parts, Server
from sapwood.data.node.wire import Hello, connect
from sapwood.errors import DataError, PeerFailed

__all__ = ["Shared"]

_log = logging.getLogger(__name__)


class Shared:
    """Get records from the process of this host that reads, which may be this one.

    The ranks of a host take their batches from a few slots, so that they go along together; the one
    that reads is ahead of the slowest by as many. If it dies or leaves, the next one reads on: each
    says which batch it needs next, and where that is in the file is arithmetic.
    """

    name = "shared"

    def __init__(
        self,
        job: Job,
        node: Node,
        rank: int,
        make: Callable[[Job], Engine],
        parts: Parts,
        *,
        takeover: bool = True,
    ) -> None:
        """``make`` gives the engine that reads; ``parts`` is as for ``Server``."""
        self._job, self._node, self._rank = job, node, rank
        self._make, self._parts, self._takeover = make, parts, takeover

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch."""
        stats = self._job.recorder.stats
        self._skewed = stats.skew_seconds
        self._link = self._join(0, range(self._node.members), 0)
        with closing(self):
            for number, records in enumerate(wanted):
                with self._job.recorder.waiting():
                    placed = self._next(number)
                needed = int(self._job.places(records)[1].sum())
                if (placed.number, placed.nbytes) != (number, needed):
                    raise DataError(
                        f"expected {needed} bytes of records of batch {number} of this pass, and "
                        f"the rank that reads gave {placed.nbytes} of {placed.number}; are all "
                        "ranks of this host at the same batch?"
                    )
                start = perf_counter_ns()
                data = self._link.copy(placed)
                stats.gather_seconds += (perf_counter_ns() - start) / 1e9
                stats.skew_seconds = self._skewed + placed.skew_ns / 1e9
                yield data
            self._link.finish()

    def close(self) -> None:
        """Let go of the process that reads, or end reading."""
        self._link.close()

    def _next(self, number: int) -> Placed:
        while True:
            try:
                return self._link.next()
            except PeerFailed as lost:
                here = self._link.here - {self._link.leader}
                if not self._takeover or self._node.local not in here:
                    raise
                self._link.close()
                self._skewed = self._job.recorder.stats.skew_seconds
                leader = min(here)
                _log.warning("%s; member %d of this host reads on", lost, leader)
                self._link = self._join(leader, here, number)

    def _join(self, leader: int, here: Collection[int], first: int) -> Link:
        node, timeout = self._node, self._job.settings.timeout
        hello = Hello(self._rank, node.local, first)
        if node.local != leader:
            wire = connect(node.address(leader), hello, timeout)
            return Link(wire, leader, here, None, timeout=timeout)
        job = replace(self._job, recorder=self._job.recorder.helper())
        server = Server(job, node, hello, here, self._make, self._parts)
        return Link(server.wire, leader, here, server, timeout=timeout)
