"""The side that reads: one thread in one process of a host."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np

from sapwood.buffers.arena import Arena
from sapwood.data.engines.base import Bytes, Engine, Ints, Job
from sapwood.data.node.place import Node
from sapwood.data.node.wire import FAILED, PLACED, USED, accept, listen
from sapwood.errors import DeadlineError, PeerFailed

__all__ = ["Server"]

_SLOTS = 4
_POLL = 0.2


@dataclass(kw_only=True)
class _Member:
    rank: int
    wire: socket.socket
    used: int = 0
    """How many batches it is done with."""
    gone: bool = False


class Server:
    """Reads the batches of all ranks of the host, some ahead, and tells each where its part is."""

    def __init__(
        self,
        job: Job,
        node: Node,
        rank: int,
        make: Callable[[Job], Engine],
        parts: Callable[[Sequence[int]], Iterator[list[Ints]]],
    ) -> None:
        """Begin; ``parts`` gives the records of each batch for each of some ranks.

        ``wire`` is how this process itself gets its part, like any other.
        """
        self._job, self._make, self._parts = job, make, parts
        self._stop = threading.Event()
        self.wire, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.wire.settimeout(job.settings.timeout)
        self._members = [_Member(rank=rank, wire=mine)]
        self._slots: list[Arena | None] = [None] * _SLOTS
        try:
            self._listening = listen(node.address, node.members)
        except OSError as error:
            self.wire.close()
            mine.close()
            raise PeerFailed(
                f"another process of this host reads for the same group already: {error}"
            ) from error
        self._others = node.members - 1
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
        while len(self._members) <= self._others and not self._stop.is_set():
            try:
                rank, wire = accept(self._listening, min(deadline, time.monotonic() + _POLL))
            except DeadlineError:
                if time.monotonic() > deadline:
                    raise
                continue
            self._members.append(_Member(rank=rank, wire=wire))
        self._members.sort(key=lambda one: one.rank)

    def _serve(self) -> None:
        asked: deque[list[Ints]] = deque()

        def wanted() -> Iterator[Ints]:
            for parts in self._parts([one.rank for one in self._members]):
                asked.append(parts)
                yield np.concatenate(parts)

        engine, number = self._make(self._job), -1
        with closing(engine.read(wanted())) as batches:
            for number, data in enumerate(batches):
                if not self._room(number - _SLOTS):
                    return
                self._place(number, data, asked.popleft())
            self._room(number)

    def _room(self, number: int) -> bool:
        """Wait until everybody is done with a batch; False if there is nobody left to read for."""
        with selectors.DefaultSelector() as waiting:
            for member in self._members:
                if not member.gone:
                    waiting.register(member.wire, selectors.EVENT_READ, member)
            while not self._stop.is_set():
                here = [one for one in self._members if not one.gone]
                if all(one.used > number for one in here):
                    return bool(here)
                for key, _ in waiting.select(_POLL):
                    if not self._hear(key.data):
                        waiting.unregister(key.fileobj)
        return False

    def _hear(self, member: _Member) -> bool:
        message = b""
        with suppress(OSError):
            message = member.wire.recv(USED.size)
        if len(message) == USED.size:
            member.used = USED.unpack(message)[0] + 1
            return True
        member.gone = True
        return False

    def _place(self, number: int, data: Bytes, parts: list[Ints]) -> None:
        slot = number % _SLOTS
        arena = self._slots[slot]
        fresh = False
        if arena is None or arena.nbytes < len(data):
            fresh = True
            if arena is not None:
                arena.close()
            arena = self._slots[slot] = Arena(len(data) + len(data) // 4 + 1, label="batch")
        arena.bytes[: len(data)] = data
        at = 0
        for member, records in zip(self._members, parts, strict=True):
            nbytes = int(self._job.index.lengths[records].sum(dtype=np.int64))
            message = PLACED.pack(number, slot, at, nbytes)
            at += nbytes
            if not member.gone:
                self._send(member, message, [arena.fd] if fresh else [])

    def _send(self, member: _Member, message: bytes, fds: list[int]) -> None:
        try:
            member.wire.settimeout(self._job.settings.timeout)
            socket.send_fds(member.wire, [message], fds)
        except OSError:
            member.gone = True

    def _tell(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".encode()[:2000]
        for member in self._members:
            self._send(member, PLACED.pack(FAILED, 0, 0, 0) + text, [])
