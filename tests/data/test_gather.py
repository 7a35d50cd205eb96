"""Copying records together, and the threads that read them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.data.engines.pool import Pool
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

    pool = Pool(1, timeout=0.05)
    try:
        read = pool.submit(stuck)
        with pytest.raises(DeadlineError, match=r"a read has taken more than 0\.05 s"):
            pool.wait(read)
        go.set()
        assert read.result(10)[:2] == (5, 1)
    finally:
        go.set()
        pool.close()


def test_a_failed_read_is_raised_where_it_is_waited_for() -> None:
    pool = Pool(2, timeout=10)
    try:
        failed, fine = pool.submit(lambda: 1 // 0), pool.submit(lambda: (1, 1))  # type: ignore
        with pytest.raises(ZeroDivisionError):
            pool.wait(failed)
        assert pool.wait(fine).nbytes == 1
        assert pool.wait(pool.submit(lambda: (2, 1))).nbytes == 2
    finally:
        pool.close()
