"""A bucket on a real server: every failure of writers, of what is stored, and of the server."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.runtime.faults import ENV
from sapwood.storage.s3.multipart import Multipart
from sapwood.storage.s3.objects import Objects
from sapwood.storage.s3.sigv4 import Credentials
from sapwood.testing import faults, ranks, seaweed
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.make import make_tiers
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.s3 import S3Tier
from sapwood.tiers.spec import NodeMap, TierSpec
from tests.tiers.bucket import (
    ID,
    SIZES,
    WHOLE,
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
from tests.tiers.shards import shard


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
