"""What every tier must do; a tier's test module calls these with its own tier."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from sapwood.errors import CheckpointError
from sapwood.tiers.base import Stored, Tier, read_range, verify
from sapwood.tiers.record import CheckpointId, ShardRecord
from tests.tiers.shards import ATTEMPT, shard


def read_all(tier: Tier, stored: Stored) -> np.ndarray:
    with closing(tier.open(stored)) as found:
        memory = np.zeros(found.record.nbytes, np.uint8)
        for part in found.record.ranges:
            read_range(found, part, memory[part.at : part.at + part.nbytes])
        return memory


def _shard(step: int, rank: int, world: int) -> tuple[ShardRecord, np.ndarray]:
    """Some have large state beside their tensors: rank 0 of every other step."""
    return shard(step, rank, world, extras=70_001 if not rank and step % 2 else 0)


def keeps_shards(tier: Tier, world: int = 2, steps: tuple[int, ...] = (1, 2)) -> None:
    """Put, list, read back byte for byte, put again, drop."""
    assert list(tier.shards()) == []
    for step in steps:
        for rank in range(world):
            tier.put(*_shard(step, rank, world))
    expected = [Stored(CheckpointId(s, ATTEMPT), r) for s in steps for r in range(world)]
    assert list(tier.shards()) == expected
    for stored in expected:
        record, memory = _shard(stored.id.step, stored.rank, world)
        assert np.array_equal(read_all(tier, stored), memory)
        with closing(tier.open(stored)) as found:
            assert found.record == record
            assert verify(found) == record.nbytes
    again = _shard(steps[0], 0, world)
    tier.put(*again)  # a retry after a lost answer
    assert np.array_equal(read_all(tier, expected[0]), again[1])
    tier.drop(expected[0].id)
    tier.drop(expected[0].id)
    assert list(tier.shards()) == [s for s in expected if s.id != expected[0].id]
    with pytest.raises(CheckpointError):
        tier.open(expected[0])
