"""A pool of shared memory for models on their way: extents in segments that others may map.

    with SegmentPool(limit=8 * 2**30) as pool:
        pack = pool.allocate_many([tensor.nbytes for tensor in tensors])
        copy_many(pack, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        lease = pack.extents[0].lease(connection)
        connection.send(..., descriptor=lease.fd)     # the other side: SegmentView(fd)

Allocating the pages of a save takes longer than copying its bytes. So they are faulted in ahead of
need, by a thread that grows the pool whenever the longest free run is shorter than the largest
request so far, and are kept until the pool is closed. ``policy="on_demand"`` makes memory for each
extent when it is asked for, and gives it back at its end: what the above is compared with.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import Self

from sapwood.buffers.extent import Block, Extent
from sapwood.buffers.grower import Grower
from sapwood.buffers.layout import LARGE, footprint, lay_out
from sapwood.buffers.mapping import HUGE_PAGE, PAGE
from sapwood.buffers.pack import Pack
from sapwood.buffers.policies import OnDemand, Policy, Preallocated, show
from sapwood.buffers.stats import PoolStats
from sapwood.errors import ConfigError, NoRoom, UsageError

__all__ = ["SegmentPool"]

_POLL = 0.02
"""A view notifies nobody when it ends, since it may end anywhere: who waits looks this often."""
_Parts = tuple[list[Block], list[list[int]]]
"""Blocks, and for each where tensors begin in it."""
_POOLS: weakref.WeakSet[SegmentPool] = weakref.WeakSet()


class SegmentPool:
    """Owns segments, and the thread that grows them; its user closes it.

    Safe to use from many threads. A forked child cannot use it, and its writes reach nobody.
    Memory is unnamed: when the last process that has it ends, however it does, it is gone.
    """

    def __init__(
        self,
        *,
        limit: int,
        policy: str = "preallocated",
        headroom: int = 0,
        segment_bytes: int = 2**30,
        huge: bool = True,
        label: str = "store",
    ) -> None:
        """``limit``: of memory. ``headroom``: of which a run is to be free at any time.

        The headroom is at least the largest extent that was ever asked for. A segment has up to
        ``segment_bytes``, or as much as one extent needs; a process that maps one keeps all of it.

        Raises:
            ConfigError: a setting is wrong.
        """
        if limit < HUGE_PAGE or segment_bytes <= 0 or not 0 <= headroom <= limit:
            raise ConfigError(
                f"a pool with limit={limit}, segment_bytes={segment_bytes}, headroom={headroom}: "
                f"the limit is at least {show(HUGE_PAGE)}, and the headroom within it"
            )
        self.limit = limit
        self.policy = policy
        self._memory = _policy(policy, limit, segment_bytes, huge, label)
        self._changed = threading.Condition(threading.Lock())
        self._grower = Grower(
            self._memory,
            self._changed,
            limit=limit,
            headroom=headroom,
            name=f"sapwood-{label}-memory",
        )
        self._closed = False
        self._owner = os.getpid()
        self._inherited = False
        # Views and extents that ended where no lock can be taken: in a destructor.
        self._dead: deque[Block] = deque()
        self._dropped: deque[Block] = deque()
        self._lingering: set[Block] = set()
        self._leases: dict[Hashable, set[Extent]] = {}
        self._in_use = self._asked = self._high_water = 0
        self._holds = self._allocations = 0
        _POOLS.add(self)
        with self._changed:
            self._grower.look_ahead()

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, wait: float = 0.0) -> Extent:
        """Memory for ``nbytes``, on a page if it is over 1 MiB, else on 64 bytes; not cleared.

        ``wait``: so many seconds for others to release theirs, if there is no room.

        Raises:
            NoRoom: it does not fit within the limit, or the machine has no more.
        """
        return self._allocate([nbytes], wait, apart=False).extents[0]

    def allocate_many(self, sizes: Sequence[int], *, wait: float = 0.0) -> Pack:
        """Memory for all of ``sizes``: in one extent, or in several if there is no run that long.

        Raises:
            NoRoom: it does not fit within the limit, or the machine has no more.
        """
        return self._allocate(sizes, wait, apart=True)

    def _allocate(self, sizes: Sequence[int], wait: float, *, apart: bool) -> Pack:
        self._check()
        if min(sizes, default=0) < 0:
            raise UsageError(f"memory for {min(sizes)} bytes was asked for")
        deadline = time.monotonic() + wait
        offsets, nbytes = lay_out(sizes)
        with self._changed:
            while True:
                self._sweep()
                if (block := self._one(nbytes)) is not None:
                    blocks, parts = [block], [offsets]
                    break
                if apart and (found := self._several(sizes, nbytes)) is not None:
                    blocks, parts = found
                    break
                if (left := deadline - time.monotonic()) <= 0:
                    raise self._no_room(nbytes)
                self._changed.wait(min(left, _POLL))
            self._note(blocks)
            self._grower.headroom = max(self._grower.headroom, footprint(nbytes))
            self._grower.look_ahead()
        return Pack(self._finished(blocks), parts, sizes)

    def prepare(self, timeout: float = 60.0) -> None:
        """Wait until the headroom is there, and say if it cannot be had.

        Raises:
            NoRoom: the limit or the machine does not allow it.
            DeadlineError: it took longer.
        """
        self._check()
        with self._changed:
            self._grower.look_ahead()
            self._grower.wait(timeout)
            if self._memory.largest < self._grower.headroom:
                raise self._no_room(self._grower.headroom)

    def release_holder(self, holder: Hashable) -> int:
        """End all leases of one holder, as of a connection that broke; how many there were."""
        self._check_process()
        with self._changed:
            leases = list(self._leases.get(holder, ()))
        ended = 0
        for lease in leases:
            try:
                lease.release()
            except UsageError:  # its user was quicker
                continue
            ended += 1
        return ended

    def stats(self) -> PoolStats:
        """What the pool has and did, now."""
        self._check_process()
        with self._changed:
            self._sweep()
            memory = self._memory
            return PoolStats(
                policy=self.policy,
                limit=self.limit,
                reserved=memory.reserved,
                in_use=self._in_use,
                asked=self._asked,
                high_water=self._high_water,
                largest_free=memory.largest,
                lingering=sum(block.nbytes for block in self._lingering),
                huge=memory.huge,
                segments=memory.segments,
                holds=self._holds,
                allocations=self._allocations,
                grown_ahead=self._grower.ahead,
                grown_late=self._grower.late,
                seconds=memory.seconds,
            )

    def close(self) -> None:
        """Give up the memory, but for what is mapped or viewed by others. May be repeated."""
        if self._inherited:
            return
        self._closed = True
        self._grower.close()
        for segment in self._memory.arenas():
            segment.close()

    def __enter__(self) -> Self:
        """It is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # -- what extents ask for ----------------------------------------------------------------

    # The lock is never taken in a forked child: a thread of the parent may have held it.

    def _check(self) -> None:
        self._check_process()
        if self._closed:
            raise UsageError("this pool of shared memory was closed")

    def _check_process(self) -> None:
        if self._inherited:
            raise UsageError(
                f"this memory belongs to process {self._owner}, of which this one is a fork: a "
                "forked process makes a pool of its own"
            )

    def _view(self, extent: Extent) -> memoryview:
        extent._check()
        with self._changed:
            extent._check()
            return extent._block.view(self._dead)

    def _lease(self, extent: Extent, holder: Hashable | None) -> Extent:
        extent._check()
        with self._changed:
            extent._check()
            extent._block.handles += 1
            self._holds += 1
            lease = Extent(self, extent._block, holder)
            if holder is not None:
                self._leases.setdefault(holder, set()).add(lease)
            return lease

    def _release(self, extent: Extent) -> None:
        self._check_process()
        with self._changed:
            if extent._released:
                raise UsageError(
                    f"this extent of {extent.nbytes} bytes was released before: each extent and "
                    "each lease is released once"
                )
            extent._released = True
            if extent._holder is not None and (held := self._leases.get(extent._holder)):
                held.discard(extent)
                if not held:
                    del self._leases[extent._holder]
            gone = self._let_go(extent._block)
        # Unmapping takes as long as faulting in; others need not wait for it.
        if gone is not None:
            self._memory.let_go(gone)

    def _forget(self, block: Block) -> bool:
        """An extent is collected; whether that is worth a warning. Takes no lock: see ``_dead``."""
        if self._closed or self._inherited:
            return False
        self._dropped.append(block)
        return True

    def _finished(self, blocks: list[Block]) -> list[Extent]:
        extents = [Extent(self, block, None) for block in blocks]
        try:
            for block in blocks:
                self._memory.make(block)
        except BaseException:
            for extent in extents:
                extent.release()
            raise
        return extents

    # -- with the lock held ------------------------------------------------------------------

    def _note(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.handles = 1
            self._in_use += block.nbytes
            self._asked += block.asked
        self._holds += len(blocks)
        self._allocations += len(blocks)
        self._high_water = max(self._high_water, self._in_use)

    def _let_go(self, block: Block) -> Block | None:
        """One hold less; the block, if it is free now."""
        block.handles -= 1
        self._holds -= 1
        if block.handles:
            return None
        if not block.idle:
            self._lingering.add(block)
            return None
        block.viewed = None
        self._lingering.discard(block)
        self._in_use -= block.nbytes
        self._asked -= block.asked
        if not self._closed:
            self._memory.give_back(block)
        self._grower.stuck = ""
        self._changed.notify_all()
        return block

    def _sweep(self) -> None:
        """Take back what ended where no lock could be taken."""
        while self._dropped:
            self._end(self._dropped.popleft())
        while self._dead:
            block = self._dead.popleft()
            if block in self._lingering and block.idle:
                block.handles += 1  # the view's own, so to speak
                self._holds += 1
                self._end(block)

    def _end(self, block: Block) -> None:
        if self._let_go(block) is not None:
            self._memory.let_go(block)

    def _one(self, nbytes: int) -> Block | None:
        while (block := self._memory.take(nbytes)) is None:
            if not self._grower.grow(footprint(nbytes)):
                return None
        return block

    def _several(self, sizes: Sequence[int], nbytes: int) -> _Parts | None:
        blocks: list[Block] = []
        parts: list[list[int]] = []
        count = 0
        # What the limit still allows first: few long runs rather than many short ones.
        while self._grower.grow(min(nbytes + LARGE, self._grower.spare), joined=False):
            pass
        while count < len(sizes):
            # An extent of pages may begin up to a page behind where its run does.
            offsets, end = lay_out(sizes, count, self._memory.largest - PAGE)
            block = self._memory.take(end) if offsets else None
            if block is None:
                for one in blocks:
                    self._memory.give_back(one)
                return None
            blocks.append(block)
            parts.append(offsets)
            count += len(offsets)
        return blocks, parts

    def _no_room(self, nbytes: int) -> NoRoom:
        lingering = sum(block.nbytes for block in self._lingering)
        unreleased = f", {show(lingering)} of it released but still viewed" if lingering else ""
        reason = f" ({self._grower.stuck})" if self._grower.stuck else ""
        return NoRoom(
            f"{show(nbytes)} of shared memory do not fit: of a limit of {show(self.limit)}, "
            f"{show(self._in_use)} are in use by {self._holds} extents and leases{unreleased}, and "
            f"the longest free run is {show(self._memory.largest)}. Release what is no longer "
            f"needed, or raise the limit{reason}"
        )

    def _inherit(self) -> None:
        """In a forked child. No lock is taken: another thread of the parent may have held it."""
        self._inherited = True
        for segment in self._memory.arenas():
            segment.make_private()


def _policy(name: str, limit: int, segment_bytes: int, huge: bool, label: str) -> Policy:
    if name == "preallocated":
        return Preallocated(limit=limit, segment_bytes=segment_bytes, huge=huge, label=label)
    if name == "on_demand":
        return OnDemand(limit=limit, label=label)
    raise ConfigError(f"policy={name!r}: it is 'preallocated' or 'on_demand'")


def _in_child() -> None:
    for pool in list(_POOLS):
        pool._inherit()


os.register_at_fork(after_in_child=_in_child)
