"""A bucket on a real server: the contract, and files made by several writers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from sapwood.errors import CheckpointError
from sapwood.state.shards import Shard
from sapwood.storage.s3.multipart import Multipart
from sapwood.testing import faults, ranks, seaweed
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.record import CheckpointId, describe
from sapwood.tiers.s3 import S3Tier
from tests.tiers import contract
from tests.tiers.bucket import (
    ID,
    SIZES,
    bins,
    check_files,
    objects,
    requests,
    short_parts,
    tier,
    uploads,
    verify_all,
    write,
)
from tests.tiers.shards import ATTEMPT, fill, plan, shard


def test_the_contract(weed: seaweed.Server, place: str) -> None:
    contract.keeps_shards(tier(weed, place))


def test_writers_in_two_processes_make_standard_files(weed: seaweed.Server, place: str) -> None:
    sizes = {"large": 3 * 2**20}  # 24 MiB per file
    ranks.spawn(write, 2, place, 7, 2, sizes, None, env=weed.environment)
    here = tier(weed, place)
    assert list(here.shards()) == [Stored(ID, 0), Stored(ID, 1)]
    check_files(objects(weed, place), ID, 2, sizes)
    assert uploads(weed, place) == []
    for rank in range(2):
        memory = shard(7, rank, 2, **sizes)[1]
        assert np.array_equal(contract.read_all(here, Stored(ID, rank)), memory)


def test_the_server_copies_what_is_large(weed: seaweed.Server, place: str) -> None:
    here = tier(weed, place)
    here.put(*shard(7, 0, 2, **SIZES))
    with requests() as seen:
        here.put(*shard(7, 1, 2, **SIZES))
    assert seen.count("copy_part") == 1
    assert seen.count("upload_part") == 2  # the header with a slice, and the small tensors
    assert seen.count("put") == 3  # the shard, its record, and the small file
    check_files(objects(weed, place), ID, 2, SIZES)


def test_no_file_before_the_last_shard(weed: seaweed.Server, place: str) -> None:
    here = tier(weed, place)
    for rank in (2, 0):
        here.put(*shard(7, rank, 3))
        names = objects(weed, place).names()
        assert not [n for n in names if "shard" not in n]
        assert not here.publish(ID)
    here.put(*shard(7, 1, 3))
    names = {n.rpartition("/")[2] for n in objects(weed, place).names()}
    assert {"manifest.json", "model.safetensors", "optimizer.safetensors"} < names


def test_a_rank_that_saves_nothing(weed: seaweed.Server, place: str) -> None:
    """As all but one of them in mode ``single``."""
    alone = plan(1)
    empty = Shard(1, ())
    here = tier(weed, place)
    for mine, data in ((empty, b""), (alone.shards[0], fill(alone, 0, 7))):
        here.put(
            describe(
                id=ID,
                world=2,
                catalog=alone.catalog,
                shard=mine,
                data=data,
                created=1.0,
                extras={},
            ),
            data,
        )
    assert list(here.shards()) == [Stored(ID, 0), Stored(ID, 1)]
    assert verify_all(here, Stored(ID, 1)) == 0
    assert here.verify_files(ID) > alone.catalog.nbytes


def test_writers_of_the_same_shards_at_the_same_time(weed: seaweed.Server, place: str) -> None:
    both = [shard(7, rank, 2, **SIZES) for rank in range(2)]
    with short_parts(), ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(tier(weed, place).put, *both[n % 2]) for n in range(4)]:
            job.result(30)
        for job in [pool.submit(tier(weed, place).publish, ID) for _ in range(2)]:
            assert job.result(30)
    check_files(objects(weed, place), ID, 2, SIZES)
    assert uploads(weed, place) == []


def test_tiny_tensors_do_not_cost_a_request_each(weed: seaweed.Server, place: str) -> None:
    here = tier(weed, place)
    record, memory = shard(7, 0, 1, large=600_000)
    here.put(record, memory)
    with requests() as seen:
        assert np.array_equal(contract.read_all(here, Stored(ID, 0)), memory)
    assert seen.count("read") <= 3 < len(record.ranges)


def test_more_objects_than_a_page_holds(weed: seaweed.Server, place: str) -> None:
    store = objects(weed, place)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"{ID.folder}/shard-{n}.json", b"{}"), range(1100)))
    here = tier(weed, place)
    assert list(here.shards()) == [Stored(ID, n) for n in range(1100)]
    here.drop(ID)
    assert store.names() == []


def test_what_is_not_ours_is_left_alone(weed: seaweed.Server, place: str) -> None:
    store = objects(weed, place)
    foreign = ["notes.txt", "00000001-zzzzzz/shard-0.json", f"{ID.folder}/x/shard-0.json"]
    for name in foreign:
        store.put(name, b"mine")
    here = tier(weed, place)
    assert list(here.shards()) == []
    here.drop(CheckpointId(1, ATTEMPT))
    assert store.names() == sorted(foreign)


def test_bytes_are_kept_once_and_read_from_the_files(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    here.put(*shard(7, 0, 2, **SIZES))
    early = here.open(Stored(ID, 0))  # while its bytes are in an object of their own
    assert bins(store)
    here.put(*shard(7, 1, 2, **SIZES))
    assert not bins(store)
    with closing(early):
        verify(early)
    for rank in range(2):
        memory = shard(7, rank, 2, **SIZES)[1]
        assert np.array_equal(contract.read_all(here, Stored(ID, rank)), memory)


def test_one_damaged_file_is_mended_by_the_shard_it_is_of(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    for rank in range(2):
        here.put(*shard(7, rank, 2, **SIZES))
    name = f"{ID.folder}/model.safetensors"
    content = bytearray(store.get(name))
    content[-9] ^= 1
    store.put(name, bytes(content))
    bad = [rank for rank in range(2) if not sound(here, Stored(ID, rank))]
    assert len(bad) == 1
    with pytest.raises(CheckpointError, match="do not match"):
        here.publish(ID)
    here.put(*shard(7, bad[0], 2, **SIZES))
    assert here.publish(ID)
    check_files(store, ID, 2, SIZES)


def sound(here: S3Tier, stored: Stored) -> bool:
    try:
        verify_all(here, stored)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("point", ["claim.json", "manifest.json"])
def test_files_of_a_claimant_that_died_are_made_by_the_next_who_publishes(
    weed: seaweed.Server, place: str, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    here, store = tier(weed, place), objects(weed, place)
    here.put(*shard(7, 0, 2))
    with (
        faults.inject(
            "s3", "raise", when=lambda object, op, **_: object.endswith(point) and op == "create"
        ),
        pytest.raises(faults.InjectedError),
    ):
        here.put(*shard(7, 1, 2))
    other = tier(weed, place)
    other.put(*shard(8, 0, 1, attempt="ffff00"))
    assert f"{ID.folder}/manifest.json" not in store.names()  # it may be at work
    monkeypatch.setattr("sapwood.tiers.s3.tier._CLAIM_SECONDS", 0.0)
    other.put(*shard(9, 0, 1, attempt="ffff00"))
    check_files(store, ID, 2, {})
    assert not bins(store)


def test_what_killed_runs_left_is_cleared(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    here.put(*shard(7, 0, 2))
    here.put(*shard(8, 0, 1))
    Multipart(here.place).begin(f"{ID.folder}/shard-1.bin")
    store.put("00000006-0a1b2c/shard-0.bin", b"no record")
    kept = store.names()
    for stale in (
        Stale(attempt=ATTEMPT, step=9, quiet=-10.0),
        Stale(attempt="ffff00", step=5, quiet=-10.0),
        Stale(attempt="ffff00", step=9),
    ):
        assert here.clear(stale) == []
    assert store.names() == kept
    cleared = here.clear(Stale(attempt="ffff00", step=9, quiet=-10.0))
    assert [id.step for id in cleared] == [6, 7]
    assert [s.id.step for s in here.shards()] == [8]
    assert uploads(weed, place) == []
