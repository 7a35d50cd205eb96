"""The side that reads: one thread in one process of a host."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np

from sapwood.buffers.arena import Arena
from sapwood.data.engines.base import Bytes, Engine, Ints, Job
from sapwood.data.node.place import Node
from sapwood.data.node.skew import Skew
from sapwood.data.node.wire import FAILED, PLACED, USED, WAITING, Hello, accept, listen
from sapwood.errors import DeadlineError, PeerFailed
from sapwood.runtime.peer import peer_process

__all__ = ["Parts", "Server"]

Parts = Callable[[Sequence[int], int], Iterator[list[Ints]]]
"""The records of each batch for each of some ranks, beginning with a number of batch."""

_SLOTS = 4
_POLL = 0.2


@dataclass(kw_only=True)
class _Member:
    rank: int
    local: int
    wire: socket.socket
    used: int
    """All batches below this number it needs no more."""
    gone: bool = False
    slots: dict[int, Arena] = field(default_factory=dict)
    """Memory it was given the descriptors of."""
    told: str = ""
    """For whom it was told to wait, since its last batch."""


class Server:
    """Reads the batches of all ranks of the host, some ahead, and tells each where its part is."""

    def __init__(
        self,
        job: Job,
        node: Node,
        me: Hello,
        here: Collection[int],
        make: Callable[[Job], Engine],
        parts: Parts,
    ) -> None:
        """Begin, with the members that are ``here``; this process is one of them.

        ``wire`` is how it gets its part, like any other.
        """
        self._job, self._make, self._parts = job, make, parts
        self._stop = threading.Event()
        self.wire, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.wire.settimeout(job.settings.timeout)
        self._members = [_Member(rank=me.rank, local=me.local, wire=mine, used=me.first)]
        self._missing = set(here) - {me.local}
        self._slots: list[Arena | None] = [None] * _SLOTS
        self._skew = Skew(here)
        try:
            self._listening = listen(node.address(me.local), node.members)
        except OSError as error:
            self.wire.close()
            mine.close()
            raise PeerFailed(
                f"another process of this host reads for the same group already: {error}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="sapwood-node-reader", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the other ranks have taken their last batches, but no longer than one read."""
        self._thread.join(self._job.settings.timeout)

    def close(self) -> None:
        """End the thread; ranks that still wait for a batch are told by the end of their wire."""
        self._stop.set()
        self.wire.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._meet()
            self._listening.close()  # whoever comes now wants the next pass, not this one
            self._serve()
        except BaseException as error:
            self._tell(error)
        finally:
            self._listening.close()
            for member in self._members:
                member.wire.close()
            for slot in self._slots:
                if slot is not None:
                    slot.close()

    def _meet(self) -> None:
        deadline = time.monotonic() + self._job.settings.timeout
        while self._missing and not self._stop.is_set():
            try:
                hello, wire = accept(self._listening, min(deadline, time.monotonic() + _POLL))
            except DeadlineError:
                names = ", ".join(str(one) for one in sorted(self._missing))
                late = f"the process with local rank {names} has not begun to read"
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"not all ranks of this host began to read in time: {late}"
                    ) from None
                self._explain(late, 0)
                continue
            self._missing.discard(hello.local)
            self._members.append(
                _Member(rank=hello.rank, local=hello.local, wire=wire, used=hello.first)
            )
        self._members.sort(key=lambda one: one.rank)

    def _serve(self) -> None:
        asked: deque[list[Ints]] = deque()
        first = min(one.used for one in self._members)

        def wanted() -> Iterator[Ints]:
            for parts in self._parts([one.rank for one in self._members], first):
                asked.append(parts)
                yield np.concatenate(parts)

        engine, number = self._make(self._job), first - 1
        with closing(engine.read(wanted())) as batches:
            for number, data in enumerate(batches, start=first):
                if not self._room(number - _SLOTS, placing=number):
                    return
                self._place(number, data, asked.popleft())
            self._room(number)

    def _room(self, number: int, placing: int | None = None) -> bool:
        """Wait until everybody is done with a batch; False if there is nobody left to read for.

        ``placing`` is the batch that others may be waiting for meanwhile.
        """
        with selectors.DefaultSelector() as waiting:
            for member in self._members:
                if not member.gone:
                    waiting.register(member.wire, selectors.EVENT_READ, member)
            while not self._stop.is_set():
                here = [one for one in self._members if not one.gone]
                late = [one for one in here if one.used <= number]
                if not late:
                    self._skew.close(number)
                    return bool(here)
                heard = waiting.select(_POLL)
                for key, _ in heard:
                    if not self._hear(key.data):
                        waiting.unregister(key.fileobj)
                if not heard and placing is not None:
                    self._explain(_names(late), placing)
        return False

    def _explain(self, late: str, placing: int) -> None:
        """Tell those who wait for a batch who keeps them waiting; else they would blame us.

        Each is told once, and must not be waited for: whoever trains meanwhile reads nothing.
        """
        message = PLACED.pack(WAITING, 0, 0, 0, 0) + late.encode()[:2000]
        for member in self._members:
            if member.gone or member.used < placing or member.told == late:
                continue
            member.told = late
            with suppress(OSError):  # a member that is gone is noticed with its next batch
                member.wire.send(message, socket.MSG_DONTWAIT)

    def _hear(self, member: _Member) -> bool:
        message = b""
        with suppress(OSError):
            message = member.wire.recv(USED.size)
        if len(message) == USED.size:
            number, when = USED.unpack(message)
            member.used = number + 1
            self._skew.note(member.local, number, when)
            return True
        member.gone = True
        return False

    def _place(self, number: int, data: Bytes, parts: list[Ints]) -> None:
        slot = number % _SLOTS
        arena = self._slots[slot]
        if arena is None or arena.nbytes < len(data):
            if arena is not None:
                arena.close()
            arena = self._slots[slot] = Arena(len(data) + len(data) // 4 + 1, label="batch")
        arena.bytes[: len(data)] = data
        here, at = self._here(), 0
        for member, records in zip(self._members, parts, strict=True):
            nbytes = int(self._job.index.lengths_of(records).sum())
            if not member.gone and member.used <= number:
                skew = self._skew.of(member.local)
                message = PLACED.pack(number, slot, at, nbytes, skew) + here
                known = member.slots.get(slot) is arena
                member.slots[slot], member.told = arena, ""
                self._send(member, message, [] if known else [arena.fd])
            at += nbytes

    def _here(self) -> bytes:
        mask = sum(1 << one.local for one in self._members if not one.gone)
        return mask.to_bytes(mask.bit_length() // 8 + 1, "little")

    def _send(self, member: _Member, message: bytes, fds: list[int]) -> None:
        try:
            member.wire.settimeout(self._job.settings.timeout)
            socket.send_fds(member.wire, [message], fds)
        except OSError:
            member.gone = True

    def _tell(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".encode()[:2000]
        for member in self._members:
            self._send(member, PLACED.pack(FAILED, 0, 0, 0, 0) + text, [])


def _names(late: Sequence[_Member]) -> str:
    """Who has not taken a batch, as the others are told."""
    first = min(one.used for one in late)
    ranks = ", ".join(f"{one.rank} (process {peer_process(one.wire)[0]})" for one in late)
    return (
        f"rank {ranks} of this host has not taken batch {first} of this pass, and the others "
        "cannot go on without it"
    )
