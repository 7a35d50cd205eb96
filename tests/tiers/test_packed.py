"""Storing less: what is unchanged is referenced, what can be is compressed, and all of it reads."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sapwood.errors import CheckpointError
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.record import CheckpointId, ShardRecord, describe
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, fill, plan, shard

MB = 2**20


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
def test_the_contract(tmp_path: Path, incremental: bool, compress: bool) -> None:
    tier = PackedTier(tmp_path / "t", incremental=incremental, compress=compress)
    contract.keeps_shards(tier)


def made(step: int, memory: np.ndarray) -> ShardRecord:
    shards = plan(1, large=4 * MB)
    return describe(
        id=CheckpointId(step, ATTEMPT),
        world=1,
        catalog=shards.catalog,
        shard=shards.shards[0],
        data=memory,
        created=float(step),
        extras={},
    )


def series(tier: PackedTier, steps: int, changed: slice) -> list[np.ndarray]:
    """Checkpoints of which only a small part changes from step to step."""
    memory = fill(plan(1, large=4 * MB), 0, 0)
    found = []
    for step in range(1, steps + 1):
        memory[changed] += 1
        record = made(step, memory)
        tier.put(record, memory)
        found.append(memory.copy())
    return found


def bytes_on_disk(folder: Path) -> int:
    found = {p.stat().st_ino: p.stat().st_size for p in folder.rglob("*.bin")}
    return sum(found.values())


def test_unchanged_ranges_are_written_once(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t")
    series(tier, 5, slice(0, 1000))
    whole = made(1, fill(plan(1, large=4 * MB), 0, 0)).nbytes
    assert bytes_on_disk(tmp_path / "t") < whole + 5 * 5 * MB


def test_every_checkpoint_reads_by_itself_whatever_was_dropped(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t")
    expected = series(tier, 5, slice(0, 1000))
    for gone in (1, 3, 2, 4):
        tier.drop(CheckpointId(gone, ATTEMPT))
        for stored in tier.shards():
            with closing(tier.open(stored)) as found:
                verify(found)
            got = contract.read_all(tier, stored)
            pieces = found.record.shard.pieces
            want = expected[stored.id.step - 1]
            assert all(
                np.array_equal(got[p.at : p.at + p.nbytes], want[p.at : p.at + p.nbytes])
                for p in pieces
            )
    assert [s.id.step for s in tier.shards()] == [5]


def test_much_change_is_not_worth_a_reference(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t")
    series(tier, 2, slice(None))
    assert not list((tmp_path / "t").rglob("*.base-*"))


def test_a_damaged_base_is_found(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t")
    series(tier, 2, slice(0, 1000))
    (base,) = (tmp_path / "t").rglob("*.base-*")
    content = bytearray(base.read_bytes())
    content[-100] ^= 1
    base.write_bytes(content)
    with (
        closing(tier.open(Stored(CheckpointId(2, ATTEMPT), 0))) as found,
        pytest.raises(CheckpointError),
    ):
        verify(found)


def test_a_base_that_was_damaged_before_is_not_referenced(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t")
    memory = fill(plan(1, large=4 * MB), 0, 0)
    tier.put(made(1, memory), memory)
    (data,) = (tmp_path / "t").rglob("shard-0.bin")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    tier.put(made(2, memory), memory)
    with closing(tier.open(Stored(CheckpointId(2, ATTEMPT), 0))) as found:
        verify(found)


@pytest.mark.parametrize("suffix", ["index", "bin", "json"])
def test_damage_is_found(tmp_path: Path, suffix: str) -> None:
    tier = PackedTier(tmp_path / "t", compress=True)
    record, memory = shard(1, 0, 1)
    tier.put(record, memory)
    path = tmp_path / "t" / record.id.folder / f"shard-0.{suffix}"
    content = path.read_bytes()
    for damaged in (
        content[:-1],
        content[: len(content) // 2],
        bytes([content[0] ^ 8]) + content[1:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError), closing(tier.open(Stored(record.id, 0))) as found:
            verify(found)


def test_compression_saves_where_there_is_something_to_save(tmp_path: Path) -> None:
    tier = PackedTier(tmp_path / "t", compress=True)
    record = made(
        1, memory := np.zeros(made(1, fill(plan(1, large=4 * MB), 0, 0)).nbytes, np.uint8)
    )
    tier.put(record, memory)
    assert bytes_on_disk(tmp_path / "t") < record.nbytes / 100
    assert np.array_equal(contract.read_all(tier, Stored(record.id, 0)), memory)
