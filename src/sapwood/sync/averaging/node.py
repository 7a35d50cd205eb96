"""Averaging through the memory of each machine, with one contribution per machine on the wire.

    rank: gradients ─> contribution (shared memory) ─> POSTED to the other ranks of the machine
    all posted ─> each lane's rank adds up its slice of all contributions, into the shared average
    several machines: the lane's ranks, one per machine, all-reduce that slice over the network
    ─> SUMMED to the other ranks ─> all slices there: the average is complete

Summing has a thread of its own. On the thread that updates weights, one subscriber that holds a
bucket would keep every rank of the machine from averaging the next one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sapwood.buffers import Arena
from sapwood.errors import PeerFailed, TransportError, UsageError
from sapwood.runtime.group import Group
from sapwood.runtime.machines import Links, Machines
from sapwood.runtime.worker import Worker
from sapwood.sync.averaging.base import BucketMemory
from sapwood.sync.averaging.messages import Kind, Message
from sapwood.sync.averaging.neighbours import Neighbours
from sapwood.sync.averaging.slices import add_up, cut
from sapwood.sync.averaging.table import Table

__all__ = ["NodeAverager"]

_ALIGNED = 4096  # buckets begin on pages of their own, which a rank can place near itself
_POLL = 1.0
_PATIENCE = 5.0


class NodeAverager:
    """Owns the links to the machine's other ranks, the shared memory and the summing thread."""

    name = "node"

    def __init__(self, group: Group, machines: Machines, links: Links) -> None:
        """All ranks make it together: lanes are communicators of their own."""
        self._group = group
        self._members = machines.of_rank(group.rank)
        self._me = self._members.index(group.rank)
        self._lanes = machines.lanes
        self._several = len(machines.ranks) > 1
        lanes = [machines.lane(n) for n in range(self._lanes)]
        wires = [group.subgroup(ranks) for ranks in lanes] if self._several else []
        self._wire = wires[self._me] if wires and self._me < self._lanes else None
        self._layout = 0
        self._layouts: dict[int, _Layout] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        """What a neighbour's end, or a collective, broke with."""
        self._own_failure: Exception | None = None
        """What went wrong here, and is nobody else's fault."""
        self._trying = False
        self._outbox = Worker("sapwood-lane") if self._wire is not None else None
        self._neighbours = Neighbours(
            links, self._received, self._progress, self._lost, self._failed_here
        )

    def lay_out(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[BucketMemory]:
        """Make this rank's memory, exchange descriptors, and map everybody's.

        Raises:
            TransportError: the memory could not be made, though ``try_out`` could.
        """
        spec = _Spec.of(sizes)
        try:
            layout = self._make(spec.nbytes)
        except OSError as error:
            raise self._no_memory(spec.nbytes, error) from error
        self._exchange(layout)
        return layout.map(spec, self._me, self._lanes)

    def try_out(self, nbytes: int) -> str:
        """Share so much memory, untouched, and give it back: what kept any rank from it, if any.

        All ranks call it, and get the same answer. Memory is made by all before anybody waits for
        another's.
        """
        self._trying = True  # a failure is an answer now, and none of the group's
        problem = self._tried(lambda: self._make(nbytes))
        if not problem:
            problem = self._tried(lambda: self._exchange(self._layouts[self._layout]))
        self._trying = False
        with self._changed:
            self._release(self._layout)
        return problem

    def _tried(self, act: Callable[[], object]) -> str:
        problem = ""
        try:
            act()
        except (OSError, AttributeError) as error:  # the latter: a Python without memfd_create
            problem = f"rank {self._group.rank}: no shared memory: {error}"
        said = self._group.gather_text("shared memory", problem)
        return next((p for p in said if p), "")

    def _make(self, nbytes: int) -> _Layout:
        """This rank's memory for a new layout."""
        mine = Arena(nbytes, label="contribution", touch=False)
        try:
            result = Arena(nbytes, label="average", touch=False) if self._me == 0 else None
        except BaseException:
            mine.close()
            raise
        with self._changed:
            self._layout += 1
            layout = self._layout_of(self._layout)
            layout.memory[self._me] = mine
            layout.result = result or layout.result
            # Messages of the layout before are behind every rank: it posted to the new one.
            self._release(self._layout - 1)
        return layout

    def _release(self, last: int) -> None:
        """Give back layouts up to ``last``; a neighbour that is ahead may have begun the next."""
        for number in [n for n in self._layouts if n <= last]:
            self._layouts.pop(number).release()

    def _exchange(self, layout: _Layout) -> None:
        """Give this rank's memory to its neighbours, and wait for theirs."""
        tell, number = self._neighbours.tell, self._layout
        tell(Message(Kind.CONTRIBUTION, number, descriptor=layout.memory[self._me].fd))
        if layout.result is not None and self._me == 0:
            tell(Message(Kind.RESULT, number, descriptor=layout.result.fd))
        self._wait_for_memory(layout)

    def _no_memory(self, nbytes: int, error: OSError) -> TransportError:
        made = TransportError(
            f"averaging in memory needs {nbytes} bytes of shared memory more, which rank "
            f"{self._group.rank} could not make ({error}); raise its limits (ulimit -n, -f, -v), "
            "or use averaging='direct'"
        )
        self._group.board.post(f"{type(made).__name__}: {made}")
        return made

    def launch(self, bucket: int, what: str) -> _NodePending:
        """Post this rank's contribution."""
        layout = self._layouts[self._layout]
        with self._changed:
            if bucket in layout.open:
                raise UsageError(f"bucket {bucket} was launched again before its average was there")
            # Rounds are counted here: a training that goes back to a checkpoint repeats steps.
            turn = layout.rounds[bucket] = layout.rounds.get(bucket, 0) + 1
            pending = _NodePending(self, layout, bucket, turn, what)
            layout.table.posted(bucket, self._me, turn)
            layout.open[bucket] = pending
            wake = layout.table.can_sum(bucket, turn)
        self._neighbours.tell(Message(Kind.POSTED, self._layout, bucket, self._me, turn))
        if wake:  # else the last neighbour's message will
            self._neighbours.wake()
        return pending

    def close(self) -> None:
        """Take leave, end the threads, give the memory back."""
        self._neighbours.close(Message(Kind.LEAVING), _PATIENCE if self._failure is None else 0.0)
        if self._outbox is not None:
            self._outbox.close(1.0)
        for layout in self._layouts.values():
            layout.release()
        self._layouts.clear()

    # -- on the summing thread -----------------------------------------------------------------

    def _received(self, rank: int, message: Message) -> None:
        member = self._members.index(rank)
        with self._changed:
            if message.layout < self._layout:
                if message.descriptor >= 0:
                    os.close(message.descriptor)
                return
            layout = self._layout_of(message.layout)
            if message.kind is Kind.CONTRIBUTION:
                layout.memory[member] = _attached(message)
                self._changed.notify_all()
            elif message.kind is Kind.RESULT:
                layout.result = _attached(message)
                self._changed.notify_all()
            elif message.kind is Kind.POSTED:
                layout.table.posted(message.bucket, member, message.round)
            elif message.kind is Kind.SUMMED:
                layout.table.summed(message.bucket, message.lane, message.round)
                self._settle(layout, message.bucket)

    def _progress(self) -> None:
        """Sum every bucket that all ranks of the machine have posted, in the order of launches."""
        while True:
            with self._changed:
                layout = self._layouts.get(self._layout)
                pending = None if layout is None else layout.next_to_sum()
            if layout is None or pending is None:
                return
            if self._me < self._lanes:
                self._sum(layout, pending)

    def _sum(self, layout: _Layout, pending: _NodePending) -> None:
        slices = layout.slices[pending.bucket]
        add_up(slices.parts, slices.out)
        if self._wire is None or self._outbox is None:
            self._announce(layout, pending)
            return
        work = self._group.all_reduce(slices.out, pending.what, group=self._wire)

        def arrived() -> None:
            try:
                work.wait()
                self._announce(layout, pending)
            except PeerFailed as error:  # whoever waits for the bucket must not wait in vain
                self._fail(error)
            except Exception as error:
                self._failed_here(error)

        self._outbox.submit(arrived)

    def _announce(self, layout: _Layout, pending: _NodePending) -> None:
        """My slice is complete."""
        message = Message(Kind.SUMMED, self._layout, pending.bucket, self._me, pending.round)
        self._neighbours.tell(message)
        with self._changed:
            layout.table.summed(pending.bucket, self._me, pending.round)
            self._settle(layout, pending.bucket)

    def _settle(self, layout: _Layout, bucket: int) -> None:
        pending = layout.open.get(bucket)
        if pending is not None and layout.table.complete(bucket, pending.round):
            del layout.open[bucket]
            pending.complete = True
            pending.done.set()

    def _lost(self, rank: int, error: Exception) -> None:
        if not self._trying:
            # It may be missed elsewhere than in a bucket: while a restore or a stop is agreed on.
            self._group.board.lose(rank, str(error))
        self._fail(error)

    def _failed_here(self, error: Exception) -> None:
        """Summing failed by itself; a collective that broke has been explained already."""
        if not isinstance(error, PeerFailed):
            self._own_failure = self._own_failure or error
        self._fail(error)

    # -- both sides ----------------------------------------------------------------------------

    def _layout_of(self, number: int) -> _Layout:
        if number not in self._layouts:
            self._layouts[number] = _Layout(len(self._members), self._lanes)
        return self._layouts[number]

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            for layout in self._layouts.values():
                for pending in layout.open.values():
                    pending.done.set()
            self._changed.notify_all()

    def _wait_for_memory(self, layout: _Layout) -> None:
        deadline = time.monotonic() + self._group.timeout
        while True:
            with self._changed:
                missing = [m for m in range(len(self._members)) if m not in layout.memory]
                if layout.result is None and not missing:
                    missing = [0]
                if not missing:
                    return
                if self._failure is None:
                    self._changed.wait(_POLL)
            # Outside the lock: it asks the store, and messages must be read meanwhile.
            self.check("exchanging shared memory", deadline, missing)

    def check(self, what: str, deadline: float, members: Sequence[int], missing: str = "") -> None:
        """Raise what is known to be wrong, here or elsewhere, or that the time is up.

        ``members`` are the ranks of this machine that are waited for; ``missing`` says for what.
        """
        own = self._own_failure
        if own is not None:
            if not self._trying:
                self._group.board.post(f"{type(own).__name__}: {own}")
            raise own
        if isinstance(self._failure, PeerFailed):
            raise self._failure
        if self._failure is not None:
            raise self._group.explain(what, self._failure) from self._failure
        self._group.check_peers(what)
        gone = [self._members[m] for m in members if self._neighbours.left(self._members[m])]
        if gone:
            raise self._group.explain(what, ConnectionResetError(f"rank {gone[0]} has left"))
        if time.monotonic() > deadline:
            missing = missing or f" (nothing from rank {self.named(members)} on this machine)"
            raise self._group.silent(what + missing)

    @property
    def timeout(self) -> float:
        """Seconds a silent peer is waited for."""
        return self._group.timeout

    @property
    def several(self) -> bool:
        """Whether sums also travel between machines."""
        return self._several

    def named(self, members: Sequence[int]) -> str:
        """Ranks, for people."""
        return ", ".join(str(self._members[m]) for m in members)


def _attached(message: Message) -> Arena:
    if message.descriptor < 0:  # the kernel drops what a process has no number left for
        raise OSError(errno.EMFILE, "Too many open files to take a neighbour's memory (ulimit -n)")
    return Arena.attach(message.descriptor)


class _NodePending:
    """A bucket being averaged in memory."""

    def __init__(
        self, owner: NodeAverager, layout: _Layout, bucket: int, turn: int, what: str
    ) -> None:
        self._owner = owner
        self._layout = layout
        self.bucket = bucket
        self.round = turn
        self.what = what
        self.summing = False
        self.complete = False
        self.done = threading.Event()

    def wait(self) -> None:
        """Wait for all slices; see ``Pending``."""
        deadline = time.monotonic() + self._owner.timeout
        self.done.wait(_POLL)
        while not self.complete:  # done without that: the owner has failed
            posted, summed = self._layout.table.missing(self.bucket, self.round)
            self._owner.check(self.what, deadline, posted or summed, self._shown(posted, summed))
            self.done.wait(_POLL)

    def _shown(self, posted: Sequence[int], summed: Sequence[int]) -> str:
        if posted:
            return f" (nothing from rank {self._owner.named(posted)} on this machine)"
        where = "another machine, or from " if self._owner.several else ""
        return f" (no sum from {where}rank {self._owner.named(summed)} of this machine)"


class _Spec:
    """Where each bucket lies in a rank's memory: the same for every rank."""

    def __init__(self, sizes: Sequence[tuple[int, torch.dtype]], offsets: list[int], nbytes: int):
        self.sizes = list(sizes)
        self.offsets = offsets
        self.nbytes = nbytes

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, torch.dtype]]) -> _Spec:
        offsets, total = [], 0
        for length, dtype in sizes:
            offsets.append(total)
            total += -(-length * dtype.itemsize // _ALIGNED) * _ALIGNED
        return cls(sizes, offsets, total)

    def view(self, arena: Arena, bucket: int) -> Tensor:
        length, dtype = self.sizes[bucket]
        start = self.offsets[bucket]
        raw = arena.bytes[start : start + length * dtype.itemsize]
        return torch.from_numpy(raw).view(dtype)


class _Slices:
    """This rank's slice of one bucket: of every contribution, and of the average."""

    __slots__ = ("out", "parts")

    def __init__(self, parts: list[Tensor], out: Tensor) -> None:
        self.parts = parts
        self.out = out


class _Layout:
    """The memory of all ranks of the machine for one layout of buckets."""

    def __init__(self, members: int, lanes: int) -> None:
        self.table = Table(members, lanes)
        self.memory: dict[int, Arena] = {}
        self.result: Arena | None = None
        self.slices: list[_Slices] = []
        self.rounds: dict[int, int] = {}
        """How often each bucket was launched."""
        self.open: dict[int, _NodePending] = {}
        """Buckets that were launched and have no average yet, in the order of launches."""

    def map(self, spec: _Spec, me: int, lanes: int) -> list[BucketMemory]:
        assert self.result is not None
        for arena in (*self.memory.values(), self.result):
            if arena.nbytes < spec.nbytes:
                raise ConnectionError("a rank of this machine laid its buckets out differently")
            arena.keep_from_children()
        made = []
        for bucket, (length, dtype) in enumerate(spec.sizes):
            contribution = spec.view(self.memory[me], bucket)
            average = spec.view(self.result, bucket)
            contribution.zero_()
            if me < lanes:
                mine = cut(length, dtype.itemsize, lanes)[me]
                everybody = [spec.view(self.memory[m], bucket) for m in sorted(self.memory)]
                # A tensor of its own: sums must not move the version counter of ``average``,
                # which tells whether the user has changed a gradient.
                out = spec.view(self.result, bucket)[mine]
                self.slices.append(_Slices([c[mine] for c in everybody], out))
                out.zero_()
            made.append(BucketMemory(contribution=contribution, average=average))
        return made

    def next_to_sum(self) -> _NodePending | None:
        for pending in self.open.values():
            if pending.summing:
                continue
            if not self.table.can_sum(pending.bucket, pending.round):
                return None
            pending.summing = True
            return pending
        return None

    def release(self) -> None:
        self.slices.clear()
        for arena in (*self.memory.values(), *([self.result] if self.result else [])):
            arena.close()
