"""A disk that is really full, and what helps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import sapwood.store
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.room import NoRoomError
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin
from tests.storage.mounts import Mount, in_child
from tests.tiers.contract import read_all
from tests.tiers.shards import ATTEMPT, shard

# A checkpoint takes 4 MiB, and while it is made twice as much; the catalog takes some, too.
SMALL, LARGE, FILLER = 15 * 2**20, 40 * 2**20, 5 * 2**20
WORLD = 2
OLD, NEW, NEXT = 1, 2, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def tier_in(folder: Path) -> VersionTier:
    return VersionTier(str(folder), Origin(series="here", name="model"))


def put_all(tier: VersionTier, step: int) -> None:
    for rank in range(WORLD):
        tier.put(*shard(step, rank, WORLD, large=2**18))


def check(tier: VersionTier, *steps: int) -> None:
    """These are there, byte for byte."""
    for step in steps:
        for rank in range(WORLD):
            _, memory = shard(step, rank, WORLD, large=2**18)
            stored = Stored(CheckpointId(step, ATTEMPT), rank)
            assert np.array_equal(read_all(tier, stored), memory)


def is_sound(folder: Path) -> None:
    with sapwood.store.open(folder) as repo:
        assert repo.verify().problems == []


def test_a_full_disk_is_no_damage_and_gets_well(folder: Path) -> None:
    def work(mount: Mount) -> None:
        with closing(tier_in(folder)) as tier:
            put_all(tier, OLD)
            filler = folder / "filler"
            filler.write_bytes(bytes(FILLER))
            for _ in range(3):
                with pytest.raises(NoRoomError):
                    put_all(tier, NEW)
                check(tier, OLD)
            mount.change(nbytes=LARGE)
            put_all(tier, NEW)
            check(tier, OLD, NEW)
        is_sound(folder)

    in_child(folder, SMALL, work)


def test_removing_makes_room_at_once(folder: Path) -> None:
    def work(mount: Mount) -> None:
        with closing(tier_in(folder)) as tier:
            put_all(tier, OLD)
            (folder / "filler").write_bytes(bytes(FILLER))
            with pytest.raises(NoRoomError):
                put_all(tier, NEW)
            tier.abandon(CheckpointId(NEW, ATTEMPT))
            check(tier, OLD)
            tier.drop(CheckpointId(OLD, ATTEMPT))
            put_all(tier, NEXT)
            check(tier, NEXT)
            assert len(tier.shards()) == WORLD
        is_sound(folder)

    in_child(folder, SMALL, work)
