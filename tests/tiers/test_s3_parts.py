"""The plan of parts: every byte once, in order, within the limits of S3."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.shards import plan_shards
from sapwood.tiers.s3.parts import GATHER, HEADER, MINIMUM, Part, plan_parts

MIB = 2**20


def catalog(sizes: list[int], world: int) -> Catalog:
    holders = tuple(range(world))
    return Catalog(
        tuple(
            Entry(file="model", name=f"t{n:04d}", dtype="U8", shape=(size,), holders=holders)
            for n, size in enumerate(sizes)
        )
    )


def plan(sizes: list[int], world: int) -> tuple[Catalog, list[Part]]:
    found = catalog(sizes, world)
    shards = plan_shards(found, world).shards
    return found, plan_parts(found.layouts["model"], dict(enumerate(shards)))


@given(
    sizes=st.lists(st.integers(0, 40 * MIB) | st.integers(0, 100_000), min_size=1, max_size=30),
    world=st.integers(1, 5),
)
def test_parts_have_every_byte_once_and_legal_sizes(sizes: list[int], world: int) -> None:
    found, parts = plan(sizes, world)
    layout = found.layouts["model"]
    shards = plan_shards(found, world).shards
    at = 0
    for part in parts:
        for run in part.runs:
            if run.rank == HEADER:
                assert (at, run.nbytes) == (0, len(layout.header))
                at += run.nbytes
                continue
            left, shard_at = run.nbytes, run.at
            while left:  # a run may go on through several pieces
                piece = next(
                    p for p in shards[run.rank].pieces if p.at <= shard_at < p.at + p.nbytes
                )
                inside = shard_at - piece.at
                assert layout.start(piece.name) + piece.start + inside == at
                step = min(left, piece.nbytes - inside)
                left, shard_at, at = left - step, shard_at + step, at + step
    assert at == layout.size
    assert all(part.nbytes >= MINIMUM for part in parts[:-1])
    for part in parts:
        assert part.nbytes < GATHER + 2 * MINIMUM or part.copied
        assert len(part.runs) == 1 or not part.copied


def test_large_tensors_are_not_sent_again() -> None:
    found, parts = plan([64 * MIB] * 4, 2)
    assert sum(part.nbytes for part in parts if not part.copied) < 2 * MINIMUM
    assert sum(part.nbytes for part in parts) == found.layouts["model"].size


def test_a_huge_tensor_stays_below_the_limit_of_parts() -> None:
    _, parts = plan([4 * 2**40], 1)
    assert len(parts) <= 10_000


def test_missing_and_doubled_bytes_are_refused() -> None:
    found = catalog([MIB, MIB], 1)
    shards = plan_shards(found, 1).shards
    layout = found.layouts["model"]
    with pytest.raises(CheckpointError, match="in no shard"):
        plan_parts(layout, {})
    with pytest.raises(CheckpointError, match="in two shards"):
        plan_parts(layout, {0: shards[0], 1: shards[0]})
    assert np.sum([p.nbytes for p in plan_parts(layout, {0: shards[0]})]) == layout.size
