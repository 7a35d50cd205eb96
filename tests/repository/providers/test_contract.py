"""What every provider does, in this process or behind a connection."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sapwood.errors import (
    BadName,
    ConfigError,
    Damaged,
    ModelExists,
    ModelNotFound,
    StoreError,
)
from sapwood.repository.base import fresh
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import (
    Head,
    Member,
    Members,
    NewPart,
    PartRange,
    Provider,
    VersionKey,
)
from sapwood.repository.providers.placement import key_of
from sapwood.storage import Durability
from tests.repository.providers.models import (
    head_of,
    load,
    proof,
    put,
    quiet,
    read,
    save,
    tensor,
    version_of,
)

SIZES = (1, 63, 64, 65, 4095, 70_001, 1 << 20, (1 << 20) + 1)
LARGE = [tensor(n, size) for n, size in enumerate(SIZES)]


def reference(name: str, version: str | None = None) -> Reference:
    return Reference(name, version)


# -- bytes ---------------------------------------------------------------------------------------


def test_a_version_comes_back_with_every_byte(provider: Provider) -> None:
    tensors = [*LARGE, b"", LARGE[0]]
    record = save(provider, "nt3/run7", "step-500", tensors, metrics={"loss": 0.5}, tags=["best"])
    assert load(provider, "nt3/run7@best") == tensors
    found, manifest, keys = provider.head(reference("nt3/run7", "step-500"))
    assert found == record
    assert keys == tuple(map(key_of, tensors))
    assert manifest.sizes == tuple(map(len, tensors))


def test_ranges_of_tensors_are_read_and_no_others(provider: Provider) -> None:
    version = version_of(save(provider, "a", "1", LARGE))
    absent = key_of(b"never put")
    outs = [bytearray(n) for n in (5, 0, 700, 9, 100_000)]
    ranges = [
        PartRange(key_of(LARGE[4]), 10, memoryview(outs[0])),
        PartRange(key_of(LARGE[4]), 4095, memoryview(outs[1])),
        PartRange(key_of(LARGE[7]), 2**20 + 1 - 700, memoryview(outs[2])),
        PartRange(absent, 0, memoryview(outs[3])),
        PartRange(key_of(LARGE[6]), 3, memoryview(outs[4])),
    ]
    assert provider.read_part(version, ranges) == [3]
    assert outs[0] == LARGE[4][10:15]
    assert outs[2] == LARGE[7][-700:]
    assert outs[3] == bytes(9)
    assert outs[4] == LARGE[6][3:100_003]


def test_a_range_beyond_its_tensor_is_refused(provider: Provider) -> None:
    version = version_of(save(provider, "a", "1", LARGE))
    for start, nbytes in ((60, 5), (64, 1), (10**12, 1), (-1, 1)):
        out = memoryview(bytearray(nbytes))
        with pytest.raises((Damaged, StoreError)):
            provider.read_part(version, [PartRange(key_of(LARGE[2]), start, out)])
    assert read(provider, version, [key_of(LARGE[2])]) == [LARGE[2]]


def test_mapped_tensors_are_private_to_who_maps_them(provider: Provider) -> None:
    version = version_of(save(provider, "a", "1", LARGE))
    keys = [*map(key_of, LARGE), key_of(b"never put")]
    mapped = provider.map_part(version, keys)
    if mapped is None:  # not on this way
        return
    assert {key: bytes(data) for key, data in mapped.items()} == dict(
        zip(keys, LARGE, strict=False)
    )
    for data in mapped.values():
        data[:1] = b"\0" if data[:1] != b"\0" else b"\1"
    assert load(provider, "a@1") == LARGE


def test_a_part_is_added_to(provider: Provider) -> None:
    version = provider.reserve("a", "1")
    assert put(provider, version, LARGE[:3]) == []
    assert put(provider, version, LARGE[2:]) == []
    assert put(provider, version, LARGE) == []
    (part,) = provider.parts()
    assert part.version == version
    assert sorted(part.keys) == sorted(map(key_of, LARGE))
    assert part.nbytes == sum(SIZES)
    assert read(provider, version, list(map(key_of, LARGE))) == LARGE


def test_equal_tensors_of_two_versions_are_kept_once(provider: Provider) -> None:
    for name in "abc":
        save(provider, name, "1", LARGE)
    provider.flush()
    assert provider.verify(said=quiet).nbytes == sum(SIZES)
    assert provider.gc(quiet=0.0, said=quiet).live == sum(SIZES)
    assert [load(provider, name) for name in "abc"] == [LARGE] * 3
    assert provider.verify(said=quiet).problems == []


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_proven_to_be_here_is_not_sent(provider: Provider, hashed: bool) -> None:
    parent = version_of(save(provider, "a", "1", LARGE))
    if hashed:
        provider.flush()
    changed = [*LARGE[:-1], tensor("new", 5000)]
    child = provider.reserve("a", "2")
    same_as = {i: proof(parent, LARGE[i]) for i in range(len(LARGE) - 1)}
    assert put(provider, child, changed, same_as=same_as) == []
    provider.put_head(head_of(child, changed), synced=False)
    provider.remove_head(parent)
    provider.drop_part(parent)
    provider.gc(quiet=0.0, said=quiet)
    assert load(provider, "a@2") == changed


def test_who_cannot_prove_its_bytes_must_send_them(provider: Provider) -> None:
    parent = version_of(save(provider, "a", "1", LARGE))
    other = VersionKey("a", "9", 12345)
    child = provider.reserve("b", "1")
    same_as = {
        0: proof(parent, LARGE[0]),
        1: (parent, b"x" * 32),
        2: proof(other, LARGE[2]),
        3: (parent, b""),
        4: proof(VersionKey("b", "1", parent.id), LARGE[4]),
    }
    assert put(provider, child, LARGE, same_as=same_as) == [1, 2, 3, 4]
    assert [part.version for part in provider.parts()] == [parent]
    assert put(provider, child, LARGE) == []


def test_a_number_does_not_give_another_models_tensors(provider: Provider) -> None:
    secret = version_of(save(provider, "secret", "1", LARGE))
    out = memoryview(bytearray(1))
    for version in (
        VersionKey("mine", "1", secret.id),
        VersionKey("secret", "2", secret.id),
        VersionKey("secret", "1", secret.id + 1),
    ):
        assert provider.read_part(version, [PartRange(key_of(LARGE[0]), 0, out)]) == [0]
        provider.drop_part(version)
    assert load(provider, "secret@1") == LARGE


def test_dropped_parts_are_gone_and_the_rest_stays(provider: Provider) -> None:
    version, other = (version_of(save(provider, name, "1", LARGE)) for name in "ab")
    provider.drop_part(version, [key_of(LARGE[1]), key_of(b"never put")])
    (rest,) = (part for part in provider.parts() if part.version == version)
    assert key_of(LARGE[1]) not in rest.keys
    assert len(rest.keys) == len(LARGE) - 1
    out = memoryview(bytearray(63))
    assert provider.read_part(version, [PartRange(key_of(LARGE[1]), 0, out)]) == [0]
    provider.gc(quiet=0.0, said=quiet)
    others = [data for data in LARGE if data != LARGE[1]]
    assert read(provider, version, list(map(key_of, others))) == others
    provider.drop_part(version)
    provider.drop_part(version)
    assert [part.version for part in provider.parts()] == [other]
    provider.gc(quiet=0.0, said=quiet)
    assert load(provider, "b@1") == LARGE
    assert provider.verify(said=quiet).problems == []


def test_parts_come_in_pages(provider: Provider) -> None:
    versions = [version_of(save(provider, f"m{n}", "1", [tensor(n, 100)])) for n in range(7)]
    found, after = [], 0
    while page := provider.parts(after, 3):
        assert len(page) <= 3
        found += [part.version for part in page]
        after = page[-1].version.id
    assert found == versions
    assert all(part.created > 1e9 for part in provider.parts())


def test_many_small_tensors(provider: Provider) -> None:
    tensors = [tensor(n, 1 + n % 37) + n.to_bytes(4, "little") for n in range(2000)]
    save(provider, "small", None, tensors)
    assert load(provider, "small@1") == tensors


def test_keys_that_are_none_are_refused(provider: Provider) -> None:
    large = (2**63).to_bytes(8, "little") + bytes(16)
    for keys in ((b"",), (b"short",), (bytes(24),), (large,), (key_of(b"x"), key_of(b"x"))):
        part = NewPart(version=VersionKey("a", "1", 77), keys=keys, same_as={})
        with pytest.raises(StoreError):
            provider.put_part(part, [memoryview(b"x")] * len(keys), Durability.MEMORY)
    assert provider.parts() == []


def test_sources_that_are_not_as_large_as_their_keys_say(provider: Provider) -> None:
    part = NewPart(version=VersionKey("a", "1", 77), keys=(key_of(b"four"),), same_as={})
    for source in (memoryview(b"thr"), memoryview(b"fives"), None):
        with pytest.raises(StoreError):
            provider.put_part(part, [source], Durability.MEMORY)
    assert provider.parts() == []


def test_names_that_are_none_are_refused(provider: Provider) -> None:
    names = [("../x", "1"), ("a\nb", "1"), ("a", ".."), ("a", "1\0"), ("", "1"), ("a" * 201, "1")]
    wrong = [VersionKey(name, version, 7) for name, version in names]
    for version in (*wrong, VersionKey("a", "1", 0), VersionKey("a", "1", 2**63)):
        with pytest.raises((BadName, StoreError)):
            put(provider, version, [b"x"])
        with pytest.raises((BadName, StoreError)):
            provider.put_head(head_of(version, [b"x"]), synced=False)
    for version in wrong:
        with pytest.raises(BadName):
            provider.reserve(version.name, version.version)
    assert provider.parts() == []
    assert provider.models("*") == []


# -- heads ---------------------------------------------------------------------------------------


def test_a_version_is_reserved_by_one(provider: Provider) -> None:
    first = provider.reserve("a", "1")
    with pytest.raises(ModelExists, match="being saved"):
        provider.reserve("a", "1")
    provider.remove_head(first)
    second = provider.reserve("a", "1")
    assert second.id > first.id
    provider.put_head(head_of(second, [b"x"]), synced=False)
    with pytest.raises(ModelExists, match="is there already"):
        provider.reserve("a", "1")
    assert provider.reserve("a", "2").id > second.id


def test_numbers_are_given_once(provider: Provider) -> None:
    assert provider.reserve("a", None).version == "1"
    second = provider.reserve("a", None)
    assert second.version == "2"
    provider.put_head(head_of(second, []), synced=False)
    provider.remove_head(second)
    assert provider.reserve("a", None).version == "3"
    found: list[VersionKey] = []
    threads = [
        threading.Thread(target=lambda: found.append(provider.reserve("b", None))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.version for one in found) == [str(n) for n in range(1, 9)]
    assert len({one.id for one in found}) == 8


def test_a_head_is_put_once(provider: Provider) -> None:
    version = provider.reserve("a", "1")
    record = provider.put_head(head_of(version, [b"x"]), synced=False)
    assert provider.put_head(head_of(version, [b"x"]), synced=True) == record
    with pytest.raises(ModelExists):
        provider.put_head(head_of(VersionKey("a", "1", version.id + 1), [b"x"]), synced=False)
    with pytest.raises(ModelExists):
        provider.put_head(head_of(VersionKey("b", "1", version.id), [b"x"]), synced=False)
    assert provider.has_head(version)
    assert not provider.has_head(VersionKey("a", "1", version.id + 1))
    provider.remove_head(version)
    provider.remove_head(version)
    assert not provider.has_head(version)
    with pytest.raises(ModelExists, match="removed"):
        provider.put_head(head_of(version, [b"x"]), synced=False)
    with pytest.raises(ModelNotFound):
        provider.remove_head(VersionKey("a", "1", 99))


def test_a_head_that_is_not_well_formed(provider: Provider) -> None:
    good = head_of(VersionKey("a", "1", 77), [b"x", b"yy"])
    bad = [
        Head(model=good.model, keys=good.keys[:1]),
        Head(model=good.model, keys=(good.keys[1], good.keys[0])),
        Head(model=good.model, keys=(b"", good.keys[1])),
        Head(model=good.model.with_blobs((fresh(0), 5)), keys=good.keys),
    ]
    for head in bad:
        with pytest.raises(StoreError):
            provider.put_head(head, synced=False)
    assert provider.models("*") == []


def test_names_tags_and_lineage(provider: Provider) -> None:
    first = save(provider, "a/b", "1", [b"x"], tags=["best"], note={"why": "ü"})
    parent = {"parent": first.id, "parent_name": "a/b"}
    second = save(provider, "a/b", "2", [b"y"], metrics={"loss": 1.5}, **parent)
    assert provider.find(reference("a/b")) == second
    assert provider.find(reference("a/b", "best")).note == {"why": "ü"}
    assert provider.tag(reference("a/b", "2"), "best").tags == ("best",)
    assert provider.find(reference("a/b", "best")).id == second.id
    provider.untag("a/b", "best")
    with pytest.raises(ModelNotFound, match="best"):
        provider.find(reference("a/b", "best"))
    assert [one.id for one in provider.children(first.id)] == [second.id]
    assert provider.by_id(first.id, "a/b").id == first.id
    with pytest.raises(ModelNotFound):
        provider.by_id(first.id, "other")
    assert [one.version for one in provider.models("a/*")] == ["1", "2"]
    assert provider.models("nothing*") == []
    with pytest.raises(ModelNotFound, match="did you mean 'a/b'"):
        provider.find(reference("a/c"))
    with pytest.raises(BadName):
        provider.tag(reference("a/b", "2"), "..")


def test_ancestors_and_configurations(provider: Provider) -> None:
    save(provider, "a", "1", [b"x"], layers={b"one": 10, b"two": 20}, configs={b"c1": b"conv"})
    save(provider, "b", "1", [b"y"], layers={b"one": 10}, metrics={"acc": 0.5})
    save(provider, "c", "1", [b"z"], layers={b"one": 10}, metrics={"acc": 0.7})
    kin = provider.kin([b"one", b"two", b"three"], "*", 2, "acc", False)
    assert [(one.record.name, one.layers, one.nbytes) for one in kin] == [
        ("a", 2, 30),
        ("c", 1, 10),
    ]
    assert provider.kin([b"one"], "b*", 5, None, True)[0].record.name == "b"
    assert provider.kin([], "*", 5, None, False) == []
    assert provider.configs([b"none", b"c1"]) == [None, b"conv"]


# -- members -------------------------------------------------------------------------------------


def test_the_later_list_of_members_is_taken(provider: Provider) -> None:
    assert provider.members().epoch == 0
    later = Members(epoch=5, members=(Member("p0", "h:1"), Member("p1", "h:2")), replicas=2)
    provider.take_members(later)
    provider.take_members(Members(epoch=4, members=(Member("p9", "h:9"),)))
    assert provider.members() == later


# -- places --------------------------------------------------------------------------------------


def test_more_durable_than_the_place_is_refused(provider: Provider, tmp_path: Path) -> None:
    version = provider.reserve("a", "1")
    if (tmp_path / "place").is_dir():
        assert put(provider, version, LARGE, Durability.SYNCED) == []
    else:
        with pytest.raises(ConfigError, match="'memory' at most"):
            put(provider, version, LARGE, Durability.WRITTEN)
        assert provider.parts() == []
    assert put(provider, version, LARGE, Durability.REPLICATED) == []
