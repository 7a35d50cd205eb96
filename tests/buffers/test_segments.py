"""One pool in one process: what it gives, refuses, takes back, and says about it."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.buffers import FaultCount, SegmentPool, policies, segment
from sapwood.errors import ConfigError, NoRoom, StorageError, UsageError

MIB = 2**20


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with SegmentPool(limit=32 * MIB, label="test") as pool:
        yield pool


@pytest.fixture(params=["preallocated", "on_demand"])
def either(request: pytest.FixtureRequest) -> Iterator[SegmentPool]:
    with SegmentPool(limit=32 * MIB, policy=request.param, label="test") as pool:
        yield pool


def test_extents_are_aligned_and_apart(either: SegmentPool) -> None:
    extents = [either.allocate(nbytes) for nbytes in (0, 1, 100, MIB, MIB + 1, 3 * MIB, 5)]
    spans = []
    for number, extent in enumerate(extents):
        assert extent.offset % (4096 if extent.nbytes > MIB else 64) == 0
        assert extent.address % 64 == 0
        assert len(extent.view) == extent.nbytes
        assert not extent.view.readonly
        extent.view[:] = bytes([number]) * extent.nbytes
        spans.append((extent.segment, extent.offset, extent.offset + extent.nbytes))
    for number, extent in enumerate(extents):
        assert bytes(extent.view) == bytes([number]) * extent.nbytes
        extent.release()
    spans.sort()
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    assert either.stats().in_use == 0


def test_the_descriptor_holds_the_bytes(either: SegmentPool) -> None:
    with either.allocate(1000) as first, either.allocate(1000) as extent:
        first.view[:] = b"a" * 1000
        extent.view[:] = b"b" * 1000
        assert os.pread(extent.fd, 1000, extent.offset) == b"b" * 1000


def test_what_is_released_is_used_again(pool: SegmentPool) -> None:
    places = set()
    for _ in range(5):
        with pool.allocate(3 * MIB) as extent:
            places.add((extent.segment, extent.offset))
    assert len(places) == 1
    assert pool.stats().allocations == 5


def test_released_twice_or_used_after_is_an_error(either: SegmentPool) -> None:
    extent = either.allocate(100)
    extent.release()
    with pytest.raises(UsageError, match="released before"):
        extent.release()
    uses: list[Callable[[], object]] = [
        lambda: extent.view,
        lambda: extent.fd,
        lambda: extent.address,
        extent.lease,
    ]
    for use in uses:
        with pytest.raises(UsageError, match="was released"):
            use()


def test_leases_keep_the_memory(either: SegmentPool) -> None:
    extent = either.allocate(2 * MIB)
    extent.view[:4] = b"keep"
    first, second = extent.lease(), extent.lease()
    extent.release()
    first.release()
    assert bytes(second.view[:4]) == b"keep"
    assert either.stats().in_use == 2 * MIB
    with pytest.raises(UsageError, match="released before"):
        first.release()
    second.release()
    assert either.stats().in_use == 0


def test_the_leases_of_a_holder_end_together(pool: SegmentPool) -> None:
    extents = [pool.allocate(100) for _ in range(3)]
    leases = [extent.lease("one") for extent in extents]
    other = extents[0].lease("two")
    for extent in extents:
        extent.release()
    leases[0].release()
    assert pool.release_holder("one") == 2
    assert pool.release_holder("one") == 0
    assert leases[1].released
    stats = pool.stats()
    assert (stats.in_use, stats.holds) == (128, 1)
    other.release()


MAKERS: dict[str, Callable[[memoryview], Any]] = {
    "memoryview": lambda view: view,
    "numpy": lambda view: np.frombuffer(view, np.float32)[5:],
    "torch": lambda view: torch.frombuffer(view, dtype=torch.int32).view(-1)[1:],
    "slice": lambda view: view[10:20].cast("B"),
}


def bytes_of(kept: Any) -> memoryview:
    return memoryview(kept.numpy() if isinstance(kept, torch.Tensor) else kept).cast("B")


@pytest.mark.parametrize("make", MAKERS)
def test_memory_is_not_used_again_while_a_view_is_left(either: SegmentPool, make: str) -> None:
    extent = either.allocate(MIB + 4)
    kept = MAKERS[make](extent.view)
    bytes_of(kept)[:4] = b"mine"
    extent.release()
    stats = either.stats()
    assert stats.lingering == stats.in_use > MIB
    with either.allocate(MIB + 4) as another:
        another.view[:] = b"x" * (MIB + 4)
        assert bytes(bytes_of(kept)[:4]) == b"mine"
    del kept
    stats = either.stats()
    assert (stats.lingering, stats.in_use) == (0, 0)


def test_a_dropped_extent_comes_back_with_a_warning(pool: SegmentPool) -> None:
    with pytest.warns(ResourceWarning, match="100 bytes was dropped without release"):
        pool.allocate(100)
    assert pool.stats().in_use == 0


def test_a_full_pool_names_sizes(either: SegmentPool) -> None:
    extent = either.allocate(20 * MIB)
    lease, kept = extent.lease(), extent.view
    extent.release()
    with pytest.raises(NoRoom, match=r"16\.0 MiB .* limit of 32\.0 MiB, 20\.0 MiB .* 1 extents"):
        either.allocate(16 * MIB)
    lease.release()
    with pytest.raises(NoRoom, match=r"20\.0 MiB of it released but still viewed"):
        either.allocate(16 * MIB)
    del kept
    either.allocate(16 * MIB).release()


def test_the_limit_is_never_passed(either: SegmentPool) -> None:
    with pytest.raises(NoRoom):
        either.allocate(33 * MIB)
    extents = [either.allocate(3 * MIB) for _ in range(10)]
    with pytest.raises(NoRoom):
        either.allocate(3 * MIB)
    assert either.stats().reserved <= 32 * MIB
    for extent in extents:
        extent.release()


def test_what_the_machine_does_not_have_is_refused(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "available_memory", lambda: 70 * MIB)
    with pytest.raises(NoRoom, match=r"6\.0 MiB of memory left, and 8\.0 MiB more are needed"):
        pool.allocate(8 * MIB)
    monkeypatch.undo()
    pool.allocate(8 * MIB).release()


def test_waiting_for_room_ends_with_a_release(either: SegmentPool) -> None:
    extent = either.allocate(30 * MIB)
    timer = threading.Timer(0.05, extent.release)
    timer.start()
    either.allocate(30 * MIB, wait=30).release()
    timer.join()


def test_waiting_for_room_ends_with_the_last_view(either: SegmentPool) -> None:
    extent = either.allocate(30 * MIB)
    kept = [extent.view]
    extent.release()
    timer = threading.Timer(0.05, kept.clear)
    timer.start()
    either.allocate(30 * MIB, wait=30).release()
    timer.join()


def test_waiting_for_room_has_an_end(either: SegmentPool) -> None:
    with either.allocate(30 * MIB), pytest.raises(NoRoom):
        either.allocate(30 * MIB, wait=0.05)


# -- many at once ----------------------------------------------------------------------------


def test_many_are_one_extent(either: SegmentPool) -> None:
    sizes = [100, 2 * MIB, 0, 64, MIB + 1]
    with either.allocate_many(sizes) as pack:
        assert len(pack.extents) == 1
        assert pack.offsets == ([0, 4096, 4096 + 2 * MIB, 4096 + 2 * MIB, 8192 + 2 * MIB],)
        assert [len(pack.view(number)) for number in range(5)] == sizes
        assert pack.where(1) == (pack.extents[0], 4096)
    assert either.stats().in_use == 0


def test_many_are_several_extents_if_no_run_is_that_long(pool: SegmentPool) -> None:
    pool.allocate(32 * MIB - 64).release()
    fence = [pool.allocate(4 * MIB) for _ in range(8)]
    for extent in fence[::2]:
        extent.release()
    sizes = [MIB] * 12
    with pytest.raises(NoRoom):
        pool.allocate(12 * MIB)
    with pool.allocate_many(sizes) as pack:
        assert 4 <= len(pack.extents) <= 5
        assert sum(map(len, pack.offsets)) == 12
        for number in range(12):
            pack.view(number)[:] = bytes([number]) * MIB
        for number in range(12):
            assert bytes(pack.view(number)) == bytes([number]) * MIB
    before = pool.stats()
    with pytest.raises(NoRoom):
        pool.allocate_many([MIB] * 17)
    assert pool.stats().in_use == before.in_use
    for extent in fence[1::2]:
        extent.release()


def test_nothing_at_all_is_a_pack_too(pool: SegmentPool) -> None:
    with pool.allocate_many([]) as pack:
        assert pack.sizes == ()


# -- growing ---------------------------------------------------------------------------------


def test_memory_is_there_before_it_is_needed() -> None:
    with SegmentPool(limit=64 * MIB, headroom=8 * MIB, label="test") as pool:
        pool.prepare()
        assert pool.stats().grown_ahead == 8 * MIB
        first = pool.allocate(6 * MIB)
        pool.prepare()  # as much as the first, and the headroom, is there again
        second = pool.allocate(8 * MIB)
        assert pool.stats().grown_late == 0
        for extent in (first, second):
            extent.release()


def test_the_next_of_the_largest_is_prepared(pool: SegmentPool) -> None:
    with pool.allocate(10 * MIB):
        pool.prepare()
        late = pool.stats().grown_late
        with pool.allocate(10 * MIB):
            assert pool.stats().grown_late == late == 10 * MIB


def test_a_segment_grows_in_place_and_then_there_is_another() -> None:
    with SegmentPool(limit=64 * MIB, segment_bytes=8 * MIB, label="test") as pool:
        extents = [pool.allocate(3 * MIB) for _ in range(4)]
        extents.append(pool.allocate(20 * MIB))
        assert [extent.segment for extent in extents[:2]] == [0, 0]
        assert {extent.segment for extent in extents[2:4]} == {1}
        # Segment 2 may have been made ahead by then, for one more of 3 MiB.
        assert extents[4].segment in (2, 3)
        for extent in extents:
            extent.release()
        stats = pool.stats()
        assert (stats.free, stats.in_use) == (stats.reserved, 0)


def test_prepared_memory_is_filled_without_faults() -> None:
    data = np.ones(8 * MIB, np.uint8)
    counts = {}
    for policy in ("preallocated", "on_demand"):
        with SegmentPool(limit=32 * MIB, headroom=8 * MIB, policy=policy, label="test") as pool:
            if policy == "preallocated":
                pool.prepare()
            with FaultCount() as faults, pool.allocate(data.nbytes) as extent:
                np.frombuffer(extent.view, np.uint8)[:] = data
            counts[policy] = faults.minor
    assert counts["on_demand"] >= 2048
    assert counts["preallocated"] < 200


def test_preparing_more_than_may_be_had_is_an_error() -> None:
    with SegmentPool(limit=8 * MIB, headroom=8 * MIB, label="test") as pool:
        pool.prepare()
        with pool.allocate(5 * MIB), pytest.raises(NoRoom, match=r"8\.0 MiB"):
            pool.prepare()


def test_a_request_that_failed_is_not_prepared_for(pool: SegmentPool) -> None:
    with pytest.raises(NoRoom):
        pool.allocate(2**40)
    pool.prepare()
    assert pool.stats().reserved == 0


def test_growing_that_fails_is_said_and_tried_again_after_a_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with SegmentPool(limit=64 * MIB, label="test") as pool:
        monkeypatch.setattr(policies, "available_memory", lambda: 64 * MIB + 4 * MIB)
        extent = pool.allocate(3 * MIB)
        monkeypatch.setattr(policies, "available_memory", lambda: 64 * MIB)
        with pytest.raises(NoRoom, match="0 bytes of memory left"):
            pool.prepare()
        monkeypatch.undo()
        assert "not prepared" in caplog.text
        extent.release()
        pool.allocate(20 * MIB).release()


@pytest.mark.parametrize("policy", ["preallocated", "on_demand"])
def test_memory_that_others_could_write_to_is_not_made(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_F_SEAL_FUTURE_WRITE", 1 << 20)  # as before Linux 5.1
    with SegmentPool(limit=8 * MIB, headroom=MIB, policy=policy, label="test") as pool:
        with pytest.raises(StorageError, match=r"takes Linux 5\.1") as caught:
            pool.allocate(100)
        assert not isinstance(caught.value, NoRoom)
        stats = pool.stats()
        assert (stats.in_use, stats.reserved, stats.holds) == (0, 0, 0)


# -- its end ---------------------------------------------------------------------------------


def test_views_outlive_the_pool(either: SegmentPool) -> None:
    extent = either.allocate(MIB + 1)
    array = np.frombuffer(extent.view, np.uint8)
    array[:] = 7
    either.close()
    either.close()
    assert (array == 7).all()
    with pytest.raises(UsageError, match="closed"):
        _ = extent.view
    with pytest.raises(UsageError, match="closed"):
        either.allocate(1)
    extent.release()


def test_closing_while_it_grows_ends_the_thread() -> None:
    pool = SegmentPool(limit=512 * MIB, headroom=512 * MIB, label="closing")
    pool.close()
    assert not [one for one in threading.enumerate() if one.name == "sapwood-closing-memory"]
    assert pool.stats().reserved < 512 * MIB


def test_no_descriptor_is_left(either: SegmentPool) -> None:
    extent = either.allocate(2 * MIB)
    inode = os.fstat(extent.fd).st_ino
    extent.release()
    either.close()
    assert inode not in {found.st_ino for found in open_files()}


def open_files() -> Iterator[os.stat_result]:
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # such as that of the folder itself
            yield one.stat()


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"limit": 2**20}, {"headroom": 2**40}, {"segment_bytes": 0}, {"policy": "lazy"}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SegmentPool(**{"limit": 32 * MIB, **wrong})  # type: ignore[arg-type]


def test_negative_sizes_are_refused(pool: SegmentPool) -> None:
    with pytest.raises(UsageError, match="-1 bytes"):
        pool.allocate(-1)
    with pytest.raises(UsageError, match="-5 bytes"):
        pool.allocate_many([3, -5])
