"""Cutting a bucket into slices, and adding up one of them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sapwood.sync.averaging.slices import add_up, cut

LINE = 64


@given(st.integers(0, 5000), st.sampled_from([2, 4, 8]), st.integers(1, 9))
def test_slices_cover_all_and_begin_at_cache_lines(length: int, size: int, count: int) -> None:
    slices = cut(length, size, count)
    assert len(slices) == count
    assert slices[0].start == 0
    assert slices[-1].stop == length
    for one, following in pairwise(slices):
        assert one.start <= one.stop == following.start
        assert one.stop * size % LINE == 0 or one.stop == length
    lines = [-(-(s.stop - s.start) * size // LINE) for s in slices]
    assert max(lines) - min(lines) <= 1


def test_more_lanes_than_elements_leave_some_empty() -> None:
    assert sorted(s.stop - s.start for s in cut(3, 4, 5)) == [0, 0, 0, 0, 3]
    assert [s.stop - s.start for s in cut(0, 4, 3)] == [0, 0, 0]


def parts_of(count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    scale = torch.tensor([10.0**k for k in range(-3, 4)])
    made = []
    for _ in range(count):
        which = torch.randint(0, 7, (length,), generator=generator)
        values = torch.randn(length, generator=generator, dtype=torch.float64)
        made.append((values * scale[which]).to(dtype))
    return made


def by_hand(parts: list[Tensor]) -> Tensor:
    wide = torch.float32 if parts[0].itemsize == 2 else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    for count, length in product([1, 2, 3, 5], [0, 1, 1000, 32768, 70001]):
        parts = parts_of(count, length, dtype)
        before = [part.clone() for part in parts]
        out = torch.full((length,), 7.0, dtype=dtype)
        add_up(parts, out)
        assert torch.equal(out, by_hand(parts)), (count, length)
        assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))


def test_the_order_matters_here() -> None:
    parts = parts_of(4, 1000, torch.float32)
    assert not torch.equal(by_hand(parts), by_hand(parts[::-1]))


def test_sixteen_bits_are_rounded_once() -> None:
    # Step by step in bfloat16, each 1 would be lost beside 256.
    parts = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    add_up(parts, out)
    assert out.item() == 260.0


def test_chunks_change_no_bit() -> None:
    parts = parts_of(2, 100_000, torch.float32)
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):  # one thread sums the whole at once, more go by chunks
            torch.set_num_threads(number)
            out = torch.empty(100_000)
            add_up(parts, out)
            found.append(out)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
