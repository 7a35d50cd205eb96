"""Counting elements: every dtype, odd values, any size, in blocks of any length."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood.report.store.histogram import Histogram, histogram
from sapwood.repository.manifest import DTYPES
from sapwood.store.raw import bytes_of


def of(tensor: Tensor, *, block: int = 64, bins: int = 64) -> Histogram:
    data = bytearray(bytes_of(tensor))

    def blocks() -> Iterator[memoryview]:
        for start in range(0, len(data), block):
            yield memoryview(data)[start : start + block]

    found = histogram(blocks, str(tensor.dtype).removeprefix("torch."), bins)
    json.dumps(found.plain(), allow_nan=False)
    finite = found.count - found.nan - found.positive_infinite - found.negative_infinite
    assert sum(found.counts) == finite
    assert len(found.edges) == (len(found.counts) + 1 if found.counts else 0)
    return found


def test_two_numbers_in_a_byte_are_two() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = of(every)
    assert (found.count, found.zero) == (512, 64)
    assert (found.least, found.most) == (-6.0, 6.0)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float4_e2m1fn_x2"])
def test_every_dtype_is_counted_whatever_its_bits(dtype: str) -> None:
    torch.manual_seed(0)
    bits = torch.randint(0, 256, (16 * 100,), dtype=torch.uint8)
    tensor = (bits % 2).bool() if dtype == "bool" else bits.view(getattr(torch, dtype))
    found = of(tensor)
    assert found.count == tensor.numel()
    real = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor
    wide = real.to(torch.float64)
    assert found.nan == int(wide.isnan().sum())
    assert found.positive_infinite == int(wide.isposinf().sum())
    assert found.negative_infinite == int(wide.isneginf().sum())
    assert found.zero == int((wide == 0).sum())
    fine = wide[wide.isfinite()]
    near = 1e-14 if tensor.is_complex() else 0.0  # two ways to a root
    assert float(found.least or 0) == pytest.approx(float(fine.min()), rel=near, abs=0)
    assert float(found.most or 0) == pytest.approx(float(fine.max()), rel=near, abs=0)


@settings(max_examples=80)
@given(
    values=st.lists(st.floats(width=64, allow_nan=True), min_size=1, max_size=60),
    block=st.sampled_from([8, 16, 64, 4096]),
    bins=st.sampled_from([1, 2, 7, 64]),
)
def test_any_numbers_are_counted(values: list[float], block: int, bins: int) -> None:
    found = of(torch.tensor(values, dtype=torch.float64), block=block, bins=bins)
    fine = [value for value in values if math.isfinite(value)]
    assert found.nan == sum(map(math.isnan, values))
    if fine:
        assert (found.least, found.most) == (min(fine), max(fine))
        assert list(found.edges) == sorted(found.edges)


@settings(max_examples=80)
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60),
    bins=st.sampled_from([1, 2, 7, 64]),
)
def test_whole_numbers_are_in_their_bins_exactly(values: list[int], bins: int) -> None:
    found = of(torch.tensor(values, dtype=torch.int64), bins=bins)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= value < high for value in values)


def test_the_largest_unsigned_numbers_are_exact() -> None:
    found = of(torch.from_numpy(np.array([0, 2**64 - 1, 2**64 - 2], np.uint64)))
    assert (found.least, found.most) == (0, 2**64 - 1)
    assert (found.counts[0], found.counts[-1]) == (1, 2)
    assert found.plain()["max"] == str(2**64 - 1)


def test_it_is_what_numpy_counts() -> None:
    values = torch.randn(10_000, dtype=torch.float64)
    found = of(values, block=4096)
    counts, edges = np.histogram(values.numpy(), 64)
    assert list(found.counts) == counts.tolist()
    np.testing.assert_allclose(found.edges, edges)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.deviation == pytest.approx(float(values.std(correction=0)))


def test_small_spreads_around_large_numbers_are_kept() -> None:
    values = 1e9 + torch.randn(10_000, dtype=torch.float64)
    assert of(values).deviation == pytest.approx(float(values.std(correction=0)), rel=1e-6)


def test_the_widest_and_the_narrowest_ranges() -> None:
    most = np.finfo(np.float64).max
    wide = of(torch.tensor([-most, 0.0, most], dtype=torch.float64))
    assert (wide.counts[0], wide.counts[-1], sum(wide.counts)) == (1, 1, 3)
    narrow = of(torch.tensor([0.0, 5e-324], dtype=torch.float64))
    assert (narrow.counts[0], narrow.counts[-1]) == (1, 1)
    constant = of(torch.full((100,), 3.5))
    assert constant.counts == (100,)


def test_truth_values_and_nothing_but_odd_ones() -> None:
    truth = of(torch.tensor([True, False, True]))
    assert truth.counts == (1, 2)
    assert truth.mean == pytest.approx(2 / 3)
    odd = of(torch.tensor([math.nan, math.inf, -math.inf, math.inf]))
    assert (odd.nan, odd.positive_infinite, odd.negative_infinite) == (1, 2, 1)
    assert odd.counts == ()
    assert odd.least is None


def test_few_whole_numbers_have_a_bin_each() -> None:
    found = of(torch.tensor([3, 5, 5], dtype=torch.int32))
    assert found.edges == (3, 4, 5, 6)
    assert found.counts == (1, 0, 2)
