"""Copying records together, and the threads that read them."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.data.engines.pool import Pool, Read
from sapwood.data.engines.spare import Spare
from sapwood.data.gather import copy_records, gather_records
from sapwood.errors import DeadlineError

SOURCE = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
LENGTHS = st.one_of(
    st.lists(st.integers(0, 300), max_size=40),
    st.lists(st.integers(0, 20), max_size=40),
    st.builds(lambda length, count: [length] * count, st.integers(0, 400), st.integers(0, 30)),
)


@given(LENGTHS, st.integers(0, 2**32))
def test_records_are_packed_in_order(lengths: list[int], seed: int) -> None:
    chance = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int64)
    offsets = np.array([chance.integers(0, len(SOURCE) - n + 1) for n in lengths], np.int64)
    parts = [SOURCE[o : o + n].tobytes() for o, n in zip(offsets, sizes, strict=True)]
    assert gather_records(SOURCE, offsets, sizes).tobytes() == b"".join(parts)
    gaps = chance.integers(0, 5, len(lengths))
    starts = np.cumsum(sizes + gaps) - sizes
    out = np.zeros(int(sizes.sum() + gaps.sum()) + 3, np.uint8)
    copy_records(out, starts, SOURCE, offsets, sizes)
    expected = bytearray(len(out))
    for start, part in zip(starts.tolist(), parts, strict=True):
        expected[start : start + len(part)] = part
    assert out.tobytes() == bytes(expected)


def test_a_read_that_takes_too_long_is_an_error() -> None:
    go = threading.Event()

    def stuck() -> tuple[int, int]:
        go.wait(10)
        return 5, 1

    done: list[Read] = []
    pool = Pool(1, 0.05, done.append)
    try:
        pool.submit(stuck)
        with pytest.raises(DeadlineError, match=r"a read has taken more than 0\.05 s"):
            pool.wait(1)
        go.set()
        while not done:
            with suppress(DeadlineError):
                pool.wait(1)
        assert done[0][:2] == (5, 1)
    finally:
        go.set()
        assert pool.close()


def test_a_failed_read_is_raised_where_it_is_waited_for() -> None:
    done: list[Read] = []
    pool = Pool(2, 10, done.append)
    try:
        pool.submit(lambda: (3, 1))
        pool.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        pool.submit(lambda: (1, 1))
        pool.wait(1)
        with pytest.raises(ZeroDivisionError):
            pool.wait(3)
        pool.wait(3)
        pool.submit(lambda: (2, 1))
        pool.wait(pool.asked)
        assert [read.nbytes for read in done] == [3, 1, 2]
    finally:
        assert pool.close()


def test_reads_are_told_in_the_order_of_asking() -> None:
    """Whichever ends first; and what was asked for after the last waiting is never told."""
    go, done = threading.Event(), list[Read]()
    pool = Pool(3, 10, done.append)
    try:
        pool.submit(lambda: (go.wait(10) and 1, 1))  # type: ignore[arg-type, return-value]
        pool.submit(lambda: (go.set() or 2, 1))  # type: ignore[func-returns-value]
        pool.submit(lambda: (3, 1))
        pool.wait(2)
        assert [read.nbytes for read in done] == [1, 2]
        assert (pool.done, pool.asked) == (2, 3)
    finally:
        go.set()
        assert pool.close()


def test_memory_is_kept_for_the_next_ring_of_the_same_size() -> None:
    spare = Spare()
    first = spare.take(8192)
    first[:4] = b"used"
    assert spare.take(8192)[:4] == bytes(4), "nobody gave it back yet"
    spare.give(first)
    assert spare.take(4096)[:4] == bytes(4)
    spare.give(first)
    assert spare.take(8192) is first
    spare.give(first)
    spare.drop()
    assert spare.take(8192) is not first
