"""A bucket on a real server: the contract, files made by several writers, and every failure."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.runtime.faults import ENV
from sapwood.state.shards import Shard
from sapwood.storage.s3.multipart import Multipart
from sapwood.storage.s3.objects import Objects
from sapwood.storage.s3.sigv4 import Credentials
from sapwood.testing import faults, ranks, seaweed
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.digest import digest
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.make import make_tiers
from sapwood.tiers.manifest import Manifest
from sapwood.tiers.record import CheckpointId, describe
from sapwood.tiers.s3 import S3Tier, parts, upload
from sapwood.tiers.spec import NodeMap, TierSpec
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, fill, plan, shard

SIZES = {"large": 1_340_000, "state": 64}
"""A slice a little longer than S3's shortest part, in one of the files."""
WHOLE = {"large": 2 * SIZES["large"], "state": 64}
"""The same for a single rank."""
ID = CheckpointId(7, ATTEMPT)


def tier(weed: seaweed.Server, place: str, **options: Any) -> S3Tier:
    return S3Tier(place, **{**weed.access, "timeout": 20.0, "retries": 2, **options})


def objects(weed: seaweed.Server, place: str) -> Objects:
    return Objects(tier(weed, place).place)


def uploads(weed: seaweed.Server, place: str) -> list[str]:
    return [one.name for one in Multipart(tier(weed, place).place).open_uploads()]


def expected(step: int, world: int, sizes: dict[str, int]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint by file, straight from the bytes of its shards."""
    shards = plan(world, **sizes)
    found: dict[str, dict[str, torch.Tensor]] = {}
    memories = [shard(step, rank, world, **sizes)[1] for rank in range(world)]
    kinds = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}
    for entry in shards.catalog.entries:
        raw = np.zeros(entry.nbytes, np.uint8)
        for memory, mine in zip(memories, shards.shards, strict=True):
            if piece := mine.by_key.get(entry.key):
                raw[piece.start : piece.stop] = memory[piece.at : piece.at + piece.nbytes]
        tensor = torch.from_numpy(raw).view(kinds[entry.dtype]) if raw.size else torch.empty(0)
        found.setdefault(entry.file, {})[entry.name] = tensor.view(entry.shape)
    return found


def check_files(store: Objects, id: CheckpointId, world: int, sizes: dict[str, int]) -> None:
    content = store.get(f"{id.folder}/manifest.json")
    manifest = json.loads(content)
    assert (manifest["step"], manifest["world"]) == (id.step, world)
    told = Manifest.decode(content, "manifest")  # the same as in a folder
    names = store.names(id.folder)
    for rank, mark in enumerate(told.records):
        if (name := f"{id.folder}/shard-{rank}.json") in names:  # a drop takes them first
            assert digest(store.get(name)) == mark
    wanted = expected(id.step, world, sizes)
    assert set(manifest["files"]) == {f"{file}.safetensors" for file in wanted}
    for file, tensors in wanted.items():
        content = store.get(f"{id.folder}/{file}.safetensors")
        assert len(content) == manifest["files"][f"{file}.safetensors"]
        found = safetensors.torch.load(content)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype or not tensor.numel()
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


@contextmanager
def short_parts() -> Iterator[None]:
    """As short as S3 allows, so that several parts need few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "PART", parts.MINIMUM)
        yield


def write(place: str, step: int, world: int, sizes: dict[str, int], only: int | None) -> None:
    """A writer in its own process: the access comes from the environment."""
    mine = ranks.rank() if only is None else only
    with short_parts(), closing(S3Tier(place, timeout=20.0, retries=2)) as here:
        here.put(*shard(step, mine, world, **sizes))


# -- what it does -----------------------------------------------------------------------------


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


def bins(store: Objects) -> list[str]:
    return [name for name in store.names() if name.endswith(".bin")]


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


# -- what goes wrong --------------------------------------------------------------------------


@contextmanager
def requests() -> Iterator[list[str]]:
    """The requests made inside the block, by name."""
    seen: list[str] = []
    lock = threading.Lock()

    def note(op: str, **_: object) -> None:
        with lock:
            seen.append(op)

    with faults.inject("s3", note, at=None):
        yield seen


def test_a_writer_killed_at_any_request(weed: seaweed.Server, place: str) -> None:
    """Before each request that changes something: what is listed is whole, a retry completes it."""
    here, store = tier(weed, place), objects(weed, place)
    last = shard(7, 1, 2, **SIZES)
    with short_parts():
        here.put(*shard(7, 0, 2, **SIZES))
        with requests() as seen:
            here.put(*last)
        points = [n for n, op in enumerate(seen, 1) if op not in ("list", "head", "get")]
        assert len(points) > 10
        for number in points:
            here.drop(ID)
            here.put(*shard(7, 0, 2, **SIZES))
            env = {**weed.environment, ENV: f"s3:kill@{number}"}
            killed = ranks.spawn(write, 1, place, 7, 2, SIZES, 1, env=env, expect_errors=True)
            assert killed[0].signal == signal.SIGKILL
            check_what_is_listed(here, store)
            here.put(*last)
            check_files(store, ID, 2, SIZES)
            assert uploads(weed, place) == []


def check_what_is_listed(here: S3Tier, store: Objects) -> None:
    listed = list(here.shards())
    assert Stored(ID, 0) in listed
    for stored in listed:
        assert verify_all(here, stored)
    if f"{ID.folder}/manifest.json" in store.names(ID.folder):
        assert listed == [Stored(ID, 0), Stored(ID, 1)]
        check_files(store, ID, 2, SIZES)


def verify_all(here: S3Tier, stored: Stored) -> int:
    with closing(here.open(stored)) as found:
        return verify(found)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_drop_that_is_interrupted(weed: seaweed.Server, place: str, number: int) -> None:
    here, store = tier(weed, place), objects(weed, place)
    for rank in range(2):
        here.put(*shard(7, rank, 2))
    with (
        faults.inject("s3", "raise", at=number, when=lambda op, **_: op == "delete"),
        pytest.raises(faults.InjectedError),
    ):
        here.drop(ID)
    assert bool(here.shards()) == (number == 1)
    # While there is a manifest, the files it speaks of are there.
    if f"{ID.folder}/manifest.json" in store.names():
        check_files(store, ID, 2, {})
    here.drop(ID)
    assert store.names() == []


def test_open_uploads_of_the_dead_are_aborted(weed: seaweed.Server, place: str) -> None:
    here = tier(weed, place)
    raw = Multipart(here.place)
    raw.begin(f"{ID.folder}/shard-0.bin")
    raw.begin("somebody/else.bin")
    assert here.sweep(older=3600) == 0
    assert here.sweep(older=-10) == 1
    assert uploads(weed, place) == ["somebody/else.bin"]
    raw.begin(f"{ID.folder}/model.safetensors")
    here.drop(ID)
    assert uploads(weed, place) == ["somebody/else.bin"]


def test_a_failed_publication_is_tried_again_without_the_shard(
    weed: seaweed.Server, place: str
) -> None:
    here = tier(weed, place)
    one = shard(7, 0, 1, **WHOLE)

    def fail(**_: object) -> None:
        raise TierError("injected")

    with (
        faults.inject("s3", fail, when=lambda op, **_: op == "copy_part"),
        pytest.raises(TierError, match="whole, but its files are not: injected"),
    ):
        here.put(*one)
    assert list(here.shards()) == [Stored(ID, 0)]
    assert uploads(weed, place) == []
    with requests() as seen:
        here.put(*one)
    assert seen.count("put") == 1  # the small file, and nothing of the shard
    check_files(objects(weed, place), ID, 1, WHOLE)


@pytest.mark.parametrize("name", ["shard-0.bin", "shard-0.json"])
def test_damage_is_found(weed: seaweed.Server, place: str, name: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    record, memory = shard(7, 0, 2)
    here.put(record, memory)
    full = f"{ID.folder}/{name}"
    content = bytearray(store.get(full))
    content[len(content) // 3] ^= 0x10
    store.put(full, bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        verify_all(here, Stored(ID, 0))
    store.put(full, bytes(content[:-7]))
    with pytest.raises(CheckpointError):
        verify_all(here, Stored(ID, 0))
    store.delete([full])
    with pytest.raises(CheckpointError):
        here.open(Stored(ID, 0))
    here.put(record, memory)
    assert verify_all(here, Stored(ID, 0)) == record.nbytes


@pytest.mark.parametrize("at", [9, 5_000, -9])
def test_damage_to_a_published_file_is_found(weed: seaweed.Server, place: str, at: int) -> None:
    here, store = tier(weed, place), objects(weed, place)
    with pytest.raises(CheckpointError, match="not whole"):
        here.verify_files(ID)
    for rank in range(2):
        here.put(*shard(7, rank, 2))
    name = f"{ID.folder}/model.safetensors"
    content = bytearray(store.get(name))
    assert here.verify_files(ID) > len(content)
    content[at] ^= 0x04
    store.put(name, bytes(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        here.verify_files(ID)
    store.put(name, bytes(content[:-1]))
    with pytest.raises(CheckpointError, match="truncated"):
        here.verify_files(ID)
    # The files are all there is of the bytes: shards put again mend them.
    with pytest.raises((TierError, CheckpointError)):
        here.publish(ID)
    for rank in range(2):
        here.put(*shard(7, rank, 2))
        assert verify_all(here, Stored(ID, rank))
    assert here.publish(ID)
    check_files(store, ID, 2, {})
    assert not bins(store)


def test_damage_to_a_manifest_is_found_and_mended(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    for rank in range(2):
        here.put(*shard(7, rank, 2))
    name = f"{ID.folder}/manifest.json"
    good = store.get(name)
    bad = good.replace(b'"step": 7', b'"step": 6')
    assert bad != good
    store.put(name, bad)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        here.verify_files(ID)
    assert here.publish(ID)
    assert store.get(name) == good
    store.delete([name])
    with pytest.raises(CheckpointError, match="is missing"):
        here.verify_files(ID)


def test_a_checkpoint_whose_manifest_was_removed(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    for step in (7, 9):
        for rank in range(2):
            here.put(*shard(step, rank, 2))
    names = [f"{CheckpointId(step, ID.attempt).folder}/manifest.json" for step in (7, 9)]
    good = store.get(names[0])
    store.delete(names)
    for rank in range(2):
        assert verify_all(here, Stored(ID, rank))
    time.sleep(1.1)  # the server's clock counts whole seconds
    here.clear(Stale(attempt="ffff00", step=11, quiet=0.0))
    assert len(here.shards()) == 4, "a checkpoint that can be read was cleared away"
    assert here.publish(ID)
    assert store.get(names[0]) == good
    assert here.verify_files(ID)
    # That a file is damaged, too, is said.
    other = CheckpointId(9, ID.attempt)
    content = bytearray(store.get(f"{other.folder}/model.safetensors"))
    content[-1] ^= 1
    store.put(f"{other.folder}/model.safetensors", bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        here.publish(other)


def test_manifests_of_earlier_versions_are_read(weed: seaweed.Server, place: str) -> None:
    here, store = tier(weed, place), objects(weed, place)
    for rank in range(2):
        here.put(*shard(7, rank, 2))
    name = f"{ID.folder}/manifest.json"
    new = json.loads(store.get(name))
    kept = {key: new[key] for key in ("format", "step", "attempt", "world", "files")}
    earlier = {**kept, "shards": ["shard-0.json", "shard-1.json"]}
    store.put(name, json.dumps(earlier, indent=1).encode())
    assert here.verify_files(ID)
    for rank in range(2):
        assert verify_all(here, Stored(ID, rank))
    # What an engine that died left beside the files still goes.
    store.put(f"{ID.folder}/shard-0.bin", b"left")
    time.sleep(1.1)  # the server's clock counts whole seconds
    store.put(name, json.dumps(earlier, indent=1).encode())
    here.clear(Stale(attempt="ffff00", step=9, quiet=0.0))
    assert not bins(store)
    assert here.verify_files(ID)


def test_a_server_that_hangs(weed: seaweed.Server, place: str) -> None:
    patient, here = tier(weed, place), tier(weed, place, timeout=0.7, retries=0)
    large, small = shard(7, 0, 1, large=4_400_000, state=64), shard(8, 0, 1)
    patient.put(*small)
    opened = tier(weed, place, timeout=2.0, retries=0).open(Stored(small[0].id, 0))
    weed.pause()
    try:
        for call in (lambda: here.put(*small), lambda: here.put(*large), here.shards):
            start = time.monotonic()
            with pytest.raises(TierError, match=r"did not answer in 0\.7 s"):
                call()
            assert time.monotonic() - start < 10
        with pytest.raises(CheckpointError, match="did not answer"):
            verify(opened)
    finally:
        weed.go_on()
    with (
        faults.inject("s3", lambda **_: weed.pause(), when=lambda op, **_: op == "upload_part"),
        pytest.raises(TierError, match="did not answer"),
    ):
        here.put(*large)
    weed.go_on()
    assert list(patient.shards()) == [Stored(small[0].id, 0)]
    patient.put(*large)
    assert uploads(weed, place) == []
    assert verify_all(patient, Stored(large[0].id, 0)) == large[0].nbytes


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    with short_parts(), seaweed.serve(tmp_path / "weed") as server:
        server.make_bucket("ckpts")
        here = tier(server, "s3://ckpts", retries=0)
        here.put(*shard(7, 0, 2, **SIZES))
        last = shard(7, 1, 2, **SIZES)
        with (
            faults.inject(
                "s3", lambda **_: server.kill(), when=lambda op, **_: op == "complete_upload"
            ),
            pytest.raises(TierError, match="did not answer"),
        ):
            here.put(*last)
        server.start()
        again = tier(server, "s3://ckpts")
        assert list(again.shards()) == [Stored(ID, 0)]
        again.put(*last)
        check_files(objects(server, "s3://ckpts"), ID, 2, SIZES)
        assert uploads(server, "s3://ckpts") == []


@pytest.mark.parametrize("large", [64, 4_400_000])
def test_errors_say_what_to_do(weed: seaweed.Server, place: str, large: int) -> None:
    one = shard(7, 0, 1, large=large, state=64)
    wrong = Credentials(access_key="tester", secret_key="wrong")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (place, {"credentials": wrong}, r"access denied for key 'tester'; check AWS_ACCESS_KEY_ID"),
        ("s3://no-such-bucket/x", {}, r"no bucket 'no-such-bucket' at .*; create it first"),
        (place, {"endpoint": "http://127.0.0.1:1"}, r"127.0.0.1:1 did not answer .* check AWS_END"),
    ]
    for where, options, text in cases:
        here = tier(weed, where, **{"retries": 0, **options})
        with pytest.raises(TierError, match=text) as found:
            here.put(*one)
        assert "wrong" not in str(found.value)
        with pytest.raises(TierError, match=text):
            here.shards()
        with pytest.raises(TierError, match=text):
            here.drop(ID)


def test_settings_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID"):
        S3Tier("s3://bucket/x")
    key = Credentials(access_key="a", secret_key="b")
    for url in ("s3://", "s3:///x", "bucket/x", "s3://bucket/x?a=b"):
        with pytest.raises(ConfigError, match="expected s3://bucket/prefix"):
            S3Tier(url, credentials=key)
    with pytest.raises(ConfigError, match="expected http"):
        S3Tier("s3://bucket", credentials=key, endpoint="localhost:9000")


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        n
        for n in sys.modules
        if n.startswith(("sapwood.tiers.s3", "sapwood.storage.s3", "obstore"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    nodes = NodeMap(node="a", rank_nodes=("a",))
    with pytest.raises(ConfigError, match=r"pip install 'sapwood\[s3\]'"):
        make_tiers([TierSpec.parse("s3://bucket/x")], nodes)
