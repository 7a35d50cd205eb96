"""Random histories of a pool: whoever holds memory finds in it what was written there."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sapwood.buffers import Extent, SegmentPool
from sapwood.errors import NoRoom

MIB = 2**20
LIMIT = 16 * MIB
sizes = st.one_of(
    st.integers(0, 300), st.integers(4000, 70_000), st.integers(MIB - 1, MIB + 1), st.just(5 * MIB)
)


def ends(data: memoryview) -> tuple[memoryview, memoryview]:
    """Enough to notice somebody else's writing; both are the same bytes where there are so few."""
    return data[:8], data[-8:] if len(data) >= 16 else data[:8]


def stamp(data: memoryview, mark: int) -> None:
    for end in ends(data):
        end[:] = mark.to_bytes(8, "big")[: len(end)]


def stamped(data: memoryview, mark: int) -> bool:
    return all(bytes(end) == mark.to_bytes(8, "big")[: len(end)] for end in ends(data))


class PoolMachine(RuleBasedStateMachine):
    """Extents, leases and arrays, ended in any order."""

    @initialize(policy=st.sampled_from(["preallocated", "on_demand"]))
    def begin(self, policy: str) -> None:
        self.pool = SegmentPool(
            limit=LIMIT, policy=policy, segment_bytes=6 * MIB, huge=False, label="model"
        )
        self.holds: list[tuple[Extent, int]] = []
        self.arrays: list[tuple[np.ndarray, int]] = []
        self.count = 0

    @rule(nbytes=sizes)
    def allocate(self, nbytes: int) -> None:
        try:
            extent = self.pool.allocate(nbytes)
        except NoRoom:
            self.quiet()
            return
        self.quiet()
        self.note(extent)

    @rule(several=st.lists(sizes, min_size=1, max_size=6))
    def allocate_many(self, several: list[int]) -> None:
        try:
            pack = self.pool.allocate_many(several)
        except NoRoom:
            self.quiet()
            return
        self.quiet()
        assert [len(pack.view(number)) for number in range(len(several))] == several
        for extent in pack.extents:
            self.note(extent)

    def quiet(self) -> None:
        """Wait for the thread that grows: what fits is the same in every run of a history."""
        with contextlib.suppress(NoRoom):
            self.pool.prepare()

    def note(self, extent: Extent) -> None:
        assert extent.offset % (4096 if extent.nbytes > MIB else 64) == 0
        self.count += 1
        stamp(extent.view, self.count)
        self.holds.append((extent, self.count))

    @precondition(lambda self: self.holds)
    @rule(number=st.integers(0), view=st.booleans())
    def use_more(self, number: int, view: bool) -> None:
        extent, mark = self.holds[number % len(self.holds)]
        if view and extent.nbytes:
            self.arrays.append((np.frombuffer(extent.view, np.uint8), mark))
        else:
            self.holds.append((extent.lease(), mark))

    @precondition(lambda self: self.holds)
    @rule(number=st.integers(0))
    def release(self, number: int) -> None:
        extent, mark = self.holds.pop(number % len(self.holds))
        assert stamped(extent.view, mark)
        extent.release()

    @precondition(lambda self: self.arrays)
    @rule(number=st.integers(0))
    def drop_array(self, number: int) -> None:
        array, mark = self.arrays.pop(number % len(self.arrays))
        assert stamped(array.data, mark)

    @invariant()
    def sizes_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        assert stats.in_use <= stats.reserved <= LIMIT
        assert stats.holds == len(self.holds)
        assert stats.asked <= stats.in_use <= stats.high_water
        assert 0 <= stats.fragmentation <= 1

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.arrays:
            self.drop_array(0)
        while self.holds:
            self.release(0)
        stats = self.pool.stats()
        assert (stats.in_use, stats.asked, stats.holds, stats.lingering) == (0, 0, 0, 0)
        self.pool.close()


TestPoolModel = PoolMachine.TestCase
TestPoolModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
