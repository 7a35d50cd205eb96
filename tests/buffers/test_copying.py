"""Many tensors copied to their places, whatever their size and address."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood.buffers import SegmentPool, copy_many
from sapwood.buffers.layout import LARGE, lay_out
from sapwood.errors import UsageError

MIB = 2**20
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with SegmentPool(limit=32 * MIB, label="copying") as pool:
        yield pool


@shared
@given(sizes=st.lists(st.sampled_from((0, 1, 7, 64, 4096, 12287, 12288, 12295, 2**20 + 3))))
def test_every_byte_is_at_its_place(pool: SegmentPool, sizes: list[int]) -> None:
    chance = np.random.default_rng(len(sizes))
    sources = [chance.integers(0, 256, size, np.uint8) for size in sizes]
    with pool.allocate_many(sizes) as pack:
        copy_many(pack, [(one.ctypes.data, one.nbytes) for one in sources])
        for number, source in enumerate(sources):
            assert bytes(pack.view(number)) == source.tobytes()


@pytest.mark.parametrize("shift", range(8))
def test_sources_may_begin_anywhere(pool: SegmentPool, shift: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, 100_000 + shift, np.uint8)[shift:]
    with pool.allocate_many([source.nbytes]) as pack:
        copy_many(pack, [(source.ctypes.data, source.nbytes)])
        assert bytes(pack.view(0)) == source.tobytes()


def test_tensors_of_any_kind_keep_their_bits(pool: SegmentPool) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45] * 8192)
    tensors = [odd, odd.to(torch.bfloat16), odd.to(torch.float64), torch.arange(99_999)]
    tensors.append(torch.view_as_complex(odd.view(-1, 2)))
    with pool.allocate_many([one.nbytes for one in tensors]) as pack:
        copy_many(pack, [(one.data_ptr(), one.nbytes) for one in tensors])
        for number, tensor in enumerate(tensors):
            assert bytes(pack.view(number)) == ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def test_a_pack_in_several_extents_is_filled(pool: SegmentPool) -> None:
    whole = pool.allocate(32 * MIB - 64)
    whole.release()  # all that there may be is there, in one run
    fence = [pool.allocate(5 * MIB) for _ in range(6)]
    for number in (0, 2, 4):
        fence[number].release()
    sizes = [4 * MIB, 4 * MIB, 100, 4 * MIB]
    sources = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
    with pool.allocate_many(sizes) as pack:
        assert len(pack.extents) == 3
        copy_many(pack, [(one.ctypes.data, one.nbytes) for one in sources])
        for number, source in enumerate(sources):
            assert bytes(pack.view(number)) == source.tobytes()
    for number in (1, 3, 5):
        fence[number].release()


def test_sources_of_another_pack_are_refused(pool: SegmentPool) -> None:
    with pool.allocate_many([8, 16]) as pack:
        for wrong, number in (([(0, 8)], 1), ([(0, 8), (0, 24)], 1), ([(0, 9), (0, 16)], 0)):
            with pytest.raises(UsageError, match=f"from number {number} on"):
                copy_many(pack, wrong)


@given(st.lists(st.integers(0, 3 * LARGE), max_size=40))
def test_tensors_lie_in_order_and_aligned(sizes: list[int]) -> None:
    offsets, end = lay_out(sizes)
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % (4096 if size > LARGE else 64) == 0
        assert at <= offset < at + (4096 if size > LARGE else 64)
        at = offset + size
    assert at == end


def test_sources_may_overlap_and_some_may_be_nowhere(pool: SegmentPool) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)
    parts = [(0, 200_000), (8, 100), (64, 50_000), (100_000, 20_000)]
    sources = [(memory.ctypes.data + begin, nbytes) for begin, nbytes in parts]
    sources += [(0, 0), (torch.empty(0).data_ptr(), 0)]
    with pool.allocate_many([nbytes for _, nbytes in sources]) as pack:
        copy_many(pack, sources)
        for number, (begin, nbytes) in enumerate(parts):
            assert bytes(pack.view(number)) == memory[begin : begin + nbytes].tobytes()
    with pool.allocate_many([0, 0]) as pack:
        copy_many(pack, [(0, 0), (0, 0)])
    with pool.allocate_many([]) as pack:
        copy_many(pack, [])
