"""Many threads on one pool: no extent is given twice, and nothing is lost."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sapwood.buffers import Extent, SegmentPool
from sapwood.errors import NoRoom, UsageError

MIB = 2**20
THREADS = 8


@pytest.mark.parametrize("policy", ["preallocated", "on_demand"])
def test_threads_never_share_memory(policy: str) -> None:
    pool = SegmentPool(limit=24 * MIB, policy=policy, segment_bytes=8 * MIB, label="threads")

    def go(number: int) -> int:
        chance, done = random.Random(number), 0
        held: list[tuple[Extent, int]] = []
        for turn in range(60):
            nbytes = chance.choice((100, 5000, 300_000, MIB + 1, 3 * MIB))
            try:
                extent = pool.allocate(nbytes, wait=chance.choice((0, 0.01)))
            except NoRoom:
                pass
            else:
                mark = number * 100 + turn
                np.frombuffer(extent.view, np.uint32, count=25)[:] = mark
                held.append((extent, mark))
                done += 1
            while len(held) > chance.randrange(4):
                extent, mark = held.pop(chance.randrange(len(held)))
                assert (np.frombuffer(extent.view, np.uint32, count=25) == mark).all()
                lease = extent.lease(number) if chance.random() < 0.3 else None
                extent.release()
                if lease is not None and chance.random() < 0.5:
                    lease.release()
                elif lease is not None:
                    assert pool.release_holder(number) >= 1
        for extent, _ in held:
            extent.release()
        return done

    with pool, ThreadPoolExecutor(THREADS) as threads:
        assert all(threads.map(go, range(THREADS)))
        stats = pool.stats()
        assert (stats.in_use, stats.holds, stats.lingering) == (0, 0, 0)
        assert stats.free == stats.reserved <= 24 * MIB


def test_everything_is_one_run_again_when_threads_are_done() -> None:
    with SegmentPool(limit=16 * MIB, segment_bytes=16 * MIB, label="threads") as pool:
        pool.allocate(16 * MIB - 64).release()

        def go(number: int) -> None:
            for _ in range(50):
                pool.allocate_many([100, 70_000, MIB + 1][: number % 3 + 1], wait=30).release()

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(go, range(THREADS)))
        stats = pool.stats()
        assert (stats.largest_free, stats.fragmentation) == (16 * MIB, 0)


def test_one_of_many_releases_succeeds() -> None:
    with SegmentPool(limit=4 * MIB, label="threads") as pool:
        extent, barrier = pool.allocate(100), threading.Barrier(THREADS)

        def go(_: int) -> bool:
            barrier.wait(10)
            try:
                extent.release()
            except UsageError:
                return False
            return True

        with ThreadPoolExecutor(THREADS) as threads:
            assert sum(threads.map(go, range(THREADS))) == 1
        assert pool.stats().in_use == 0


def test_threads_that_need_memory_at_once_grow_it_once_each() -> None:
    with SegmentPool(limit=64 * MIB, label="threads") as pool:
        barrier = threading.Barrier(THREADS)

        def go(_: int) -> Extent:
            barrier.wait(10)
            return pool.allocate(6 * MIB)

        with ThreadPoolExecutor(THREADS) as threads:
            extents = list(threads.map(go, range(THREADS)))
        spans = sorted((one.segment, one.offset) for one in extents)
        assert len(set(spans)) == THREADS
        assert pool.stats().reserved <= 64 * MIB
        for extent in extents:
            extent.release()
