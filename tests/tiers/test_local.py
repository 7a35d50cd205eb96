"""A folder of this node: the contract, and every kind of damage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId, ShardRecord
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, shard

ID = CheckpointId(7, ATTEMPT)


def test_the_contract(tmp_path: Path) -> None:
    contract.keeps_shards(LocalTier(tmp_path / "a" / "b"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_every_flipped_bit_of_the_data_is_found(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    record, memory = shard(7, 0, 1, large=64)
    tier.put(record, memory)
    path = tmp_path / ID.folder / "shard-0.bin"
    inside = {b for p in record.shard.pieces for b in range(p.at, p.at + p.nbytes)}
    for at in sorted(inside)[::7]:
        flip(path, at)
        with (
            closing(tier.open(Stored(ID, 0))) as found,
            pytest.raises(CheckpointError, match="dam"),
        ):
            verify(found)
        flip(path, at)
    with closing(tier.open(Stored(ID, 0))) as found:
        verify(found)


def test_every_flipped_bit_of_a_record_is_found(tmp_path: Path) -> None:
    record, _ = shard(7, 0, 1, large=64)
    content = record.encode()
    for at in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 0x04
        with pytest.raises(CheckpointError):
            ShardRecord.decode(bytes(damaged), "it")


@pytest.mark.parametrize("name", ["shard-0.bin", "shard-0.json"])
@pytest.mark.parametrize("keep", [0, 1, 0.5])
def test_truncated_and_missing_files_are_found(tmp_path: Path, name: str, keep: float) -> None:
    tier = LocalTier(tmp_path)
    tier.put(*shard(7, 0, 1))
    path = tmp_path / ID.folder / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if keep < 1 else -1])
    with pytest.raises(CheckpointError), closing(tier.open(Stored(ID, 0))) as found:
        verify(found)
    path.unlink()
    with pytest.raises(CheckpointError):
        tier.open(Stored(ID, 0))


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "00000001-zzzzzz").mkdir()
    (tmp_path / ID.folder).mkdir()
    (tmp_path / ID.folder / "shard-x.json").write_text("{}")
    tier = LocalTier(tmp_path)
    assert list(tier.shards()) == []
    tier.drop(CheckpointId(1, ATTEMPT))
    assert (tmp_path / "notes.txt").exists()


def test_a_place_that_cannot_be_written_is_an_error_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot write"):
        LocalTier(tmp_path / "file" / "x").put(*shard(1, 0, 1))


def test_what_crashes_left_of_older_checkpoints_goes_with_the_next_drop(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "t")
    for step in (4, 5):
        tier.put(*shard(step, 0, 1))
    rest, newer = tmp_path / "t" / "00000003-ffffff", tmp_path / "t" / "00000006-ffffff"
    for home in (rest, newer):  # a data file whose record was never written
        home.mkdir()
        (home / "shard-0.bin").write_bytes(b"x")
    tier.drop(CheckpointId(4, ATTEMPT))
    assert not rest.exists()
    assert newer.exists()
    assert [s.id.step for s in tier.shards()] == [5]
