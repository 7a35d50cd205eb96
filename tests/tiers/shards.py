"""Shards with known bytes, for any tier."""

from __future__ import annotations

import numpy as np

from sapwood.state.catalog import Catalog, Entry
from sapwood.state.shards import SMALL_SLICE, ShardPlan, plan_shards
from sapwood.tiers.record import CheckpointId, ShardRecord, describe

ATTEMPT = "0a1b2c"


def catalog(world: int, *, large: int = SMALL_SLICE // 2, state: int | None = None) -> Catalog:
    """A tensor that is sliced, small ones that are not, an empty one; two files."""
    holders = tuple(range(world))

    def entry(file: str, name: str, *shape: int, dtype: str = "F32") -> Entry:
        return Entry(file=file, name=name, dtype=dtype, shape=shape, holders=holders)

    return Catalog(
        (
            entry("model", "large", world, large),
            entry("model", "small", 3, 5),
            entry("model", "half", 7, dtype="BF16"),
            entry("model", "empty", 0, 4),
            entry("optimizer", "large/momentum_buffer", world, large if state is None else state),
            entry("optimizer", "small/step", dtype="F64"),
        )
    )


def plan(world: int, **options: int) -> ShardPlan:
    return plan_shards(catalog(world, **options), world)


def fill(shards: ShardPlan, rank: int, step: int, extras: int = 0) -> np.ndarray:
    """The memory of a shard, different for every rank, step and byte."""
    shard = shards.shards[rank]
    generator = np.random.default_rng([step, rank])
    memory = np.zeros(shard.nbytes_with(extras), np.uint8)
    for piece in shard.pieces:
        part = generator.integers(0, 256, piece.nbytes, np.uint8)
        memory[piece.at : piece.at + piece.nbytes] = part
    memory[shard.extras_at :] = generator.integers(0, 256, extras, np.uint8)
    return memory


def described(
    shards: ShardPlan,
    rank: int,
    step: int,
    memory: np.ndarray,
    attempt: str = ATTEMPT,
    extras: int = 0,
) -> ShardRecord:
    """The record of a shard with these bytes."""
    return describe(
        id=CheckpointId(step, attempt),
        world=len(shards.shards),
        catalog=shards.catalog,
        shard=shards.shards[rank],
        data=memory,
        created=float(step),
        extras={"step": step, "rank": rank},
        extras_bytes=extras,
    )


def shard(
    step: int, rank: int, world: int, *, attempt: str = ATTEMPT, extras: int = 0, **options: int
) -> tuple[ShardRecord, np.ndarray]:
    """A record and its bytes, with so many of state that is not in tensors."""
    shards = plan(world, **options)
    memory = fill(shards, rank, step, extras)
    return described(shards, rank, step, memory, attempt, extras), memory
