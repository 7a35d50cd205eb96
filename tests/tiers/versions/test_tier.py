"""The store tier: the contract, what a version holds, what waits, and what may not be removed."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import sapwood.store
from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.base import Misplaced, Stored, open_checked, verify
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.record import CheckpointId, ShardRecord, describe
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, shard

ID = CheckpointId(7, ATTEMPT)
ORIGIN = Origin(series="here", name="nt3/run7")


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "models")


@pytest.fixture
def tier(place: str) -> Iterator[VersionTier]:
    with closing(VersionTier(place, ORIGIN)) as found:
        yield found


def put_all(tier: VersionTier, world: int = 2, step: int = 7, **options: int) -> None:
    for rank in range(world):
        tier.put(*shard(step, rank, world, **options))


def versions(place: str, pattern: str = "*") -> list[str]:
    with sapwood.store.open(place, create=False) as repo:
        return [str(record.reference) for record in repo.models(pattern)]


def hidden(place: str) -> list[str]:
    return versions(place, ".*")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_contract(tier: VersionTier, world: int) -> None:
    contract.keeps_shards(tier, world)


def test_it_appears_when_all_shards_are_there(tier: VersionTier, place: str) -> None:
    tier.put(*shard(7, 1, 2))
    assert versions(place) == []
    assert list(tier.shards()) == [Stored(ID, 1)]
    contract.read_all(tier, Stored(ID, 1))
    tier.put(*shard(7, 0, 2))
    assert versions(place) == ["nt3/run7@step-7"]
    assert hidden(place) == []
    assert list(tier.shards()) == [Stored(ID, 0), Stored(ID, 1)]
    tier.verify_files(ID)


def test_the_model_is_the_value_and_nothing_else(tier: VersionTier, place: str) -> None:
    put_all(tier)
    with sapwood.store.open(place) as repo:
        value = repo.load("nt3/run7")
        assert {n: (t.dtype, tuple(t.shape)) for n, t in value.items()} == {
            "large": (torch.float32, (2, 2**15)),
            "small": (torch.float32, (3, 5)),
            "half": (torch.bfloat16, (7,)),
            "empty": (torch.float32, (0, 4)),
        }
        assert list(repo.load("nt3/run7", layers="sm*")) == ["small"]
        assert set(repo.open("nt3/run7")) == set(value)
        assert set(repo.open("nt3/run7").value()) == set(value)
        assert not repo.verify().problems
    record, memory = shard(7, 0, 2)
    piece = next(p for p in record.shard.pieces if p.name == "large")
    mine = value["large"].reshape(-1).view(torch.uint8)[piece.start : piece.stop].numpy()
    assert np.array_equal(mine, memory[piece.at : piece.at + piece.nbytes])


def test_what_waits_is_in_nobodys_list_and_sound(tier: VersionTier, place: str) -> None:
    tier.put(*shard(7, 1, 3))
    with sapwood.store.open(place) as repo:
        assert repo.models() == []
        repo.flush()
        assert not repo.verify().problems
        with pytest.raises(sapwood.SapwoodError, match="no model"):
            repo.load("nt3/run7")


def test_shards_of_two_models_never_become_one(tier: VersionTier, place: str) -> None:
    tier.put(*shard(7, 0, 2))
    with pytest.raises(TierError, match="have other tensors"):
        tier.put(*shard(7, 1, 2, large=20_000))
    assert versions(place) == []


def test_another_shard_in_its_place_gives_way_until_it_is_whole(
    tier: VersionTier, place: str
) -> None:
    tier.put(*shard(7, 0, 2))
    changed, memory = shard(7, 0, 2, extras=70_000)
    tier.put(changed, memory)
    assert np.array_equal(contract.read_all(tier, Stored(ID, 0)), memory)
    tier.put(*shard(7, 1, 2))
    with pytest.raises(TierError, match="is complete and has another shard"):
        tier.put(*shard(7, 0, 2))


def test_two_trainings_in_one_repository_do_not_see_each_other(
    tier: VersionTier, place: str
) -> None:
    put_all(tier)
    with closing(VersionTier(place, Origin(series="there", name=""))) as other:
        assert list(other.shards()) == []
        put_all(other)
        other.drop(ID)
        assert list(other.shards()) == []
    assert len(tier.shards()) == 2
    contract.read_all(tier, Stored(ID, 1))


def test_a_step_that_is_come_to_again_is_another_version(tier: VersionTier, place: str) -> None:
    put_all(tier, 1)
    tier.put(*shard(7, 0, 1, attempt="ffffff"))
    assert versions(place) == ["nt3/run7@step-7", "nt3/run7@step-7-ffffff"]
    for attempt in (ATTEMPT, "ffffff"):
        stored = Stored(CheckpointId(7, attempt), 0)
        assert np.array_equal(contract.read_all(tier, stored), shard(7, 0, 1, attempt=attempt)[1])


def test_what_has_a_tag_stays(tier: VersionTier, place: str) -> None:
    put_all(tier)
    put_all(tier, step=8)
    with sapwood.store.open(place) as repo:
        repo.tag("nt3/run7@step-7", "best")
    assert tier.pinned() == {ID}
    with pytest.raises(TierError, match="has the tag 'best'"):
        tier.drop(ID)
    with sapwood.store.open(place) as repo:
        repo.untag("nt3/run7", "best")
    tier.drop(ID)
    assert versions(place) == ["nt3/run7@step-8"]


def test_a_removed_version_is_no_checkpoint_any_more(tier: VersionTier, place: str) -> None:
    put_all(tier)
    with sapwood.store.open(place) as repo:
        repo.remove("nt3/run7@step-7")
    assert list(tier.shards()) == []
    with pytest.raises(CheckpointError, match="is not there"):
        tier.open(Stored(ID, 0))


def test_what_is_left_unfinished_is_finished_by_the_next(place: str) -> None:
    with closing(VersionTier(place, ORIGIN)) as first:
        first.put(*shard(7, 0, 2))
    with closing(VersionTier(place, Origin(series="x", name="x"))) as other:
        other.put(*shard(1, 0, 2))
    stage_only(place, 7, 1)
    with closing(VersionTier(place, ORIGIN)) as then:
        then.put(*shard(8, 0, 2))
    assert versions(place) == ["nt3/run7@step-7"]


def stage_only(place: str, step: int, rank: int) -> None:
    """As an engine leaves it that is killed just before it makes the version."""
    from sapwood.repository.opening import open_backend
    from sapwood.tiers.versions.staging import stage

    backend, most = open_backend(place, create=False)
    record, memory = shard(step, rank, 2)
    stage(backend, ORIGIN, record, memoryview(memory).cast("B"), None, most)
    backend.close()


def test_old_rests_are_cleared(tier: VersionTier, place: str) -> None:
    tier.put(*shard(3, 0, 2, attempt="dead00"))
    put_all(tier)
    assert tier.clear(Stale(attempt=ATTEMPT, step=7)) == []
    assert len(hidden(place)) == 1
    dead = CheckpointId(3, "dead00")
    assert tier.clear(Stale(attempt=ATTEMPT, step=7, quiet=0.0)) == [dead]
    assert hidden(place) == []
    assert len(tier.shards()) == 2


def test_gc_of_the_repository_clears_too(tier: VersionTier, place: str) -> None:
    tier.put(*shard(3, 0, 2))
    with sapwood.store.open(place) as repo:
        repo.gc()
        assert len(hidden(place)) == 1
        swept = repo.gc(quiet=0.0)
        assert swept.live == 0
    assert hidden(place) == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_does_not_change_takes_no_room(place: str, world: int) -> None:
    """Of a second checkpoint, only what is new is written: frozen tensors cost nothing."""
    nbytes = []
    with closing(VersionTier(place, ORIGIN)) as tier:
        for step in (1, 2, 3):
            for rank in range(world):
                record, memory = shard(1, rank, world)
                again, _ = shard(step, rank, world)
                changed = memory.copy()
                for piece in record.shard.pieces:
                    if piece.name == "small" and step > 1:
                        changed[piece.at : piece.at + piece.nbytes] = step
                tier.put(_described(again, changed), changed)
            nbytes.append(stored_bytes(place))
            assert len(tier.shards()) == step * world
    assert all(after - before < 20_000 for before, after in pairwise(nbytes))
    assert nbytes[0] > world * 2**17


def _described(record: ShardRecord, memory: np.ndarray) -> ShardRecord:
    return describe(
        id=record.id,
        world=record.world,
        catalog=record.catalog,
        shard=record.shard,
        data=memory,
        created=record.created,
        extras=record.extras,
        extras_bytes=record.extras_bytes,
    )


def stored_bytes(place: str) -> int:
    return sum(path.stat().st_size for path in Path(place, "packs").rglob("*") if path.is_file())


@pytest.mark.parametrize("limit", [1, 300_000])
def test_what_is_put_together_takes_little_memory(
    tier: VersionTier, place: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors of several ranks are saved some at a time, and nothing is left of that."""
    monkeypatch.setattr("sapwood.tiers.versions.draft.GATHERED", limit)
    for step in (7, 8):
        for rank in range(3):
            tier.put(*shard(step, rank, 3, extras=50_000 if rank else 0))
    for stored in tier.shards():
        extras = 50_000 if stored.rank else 0
        _, memory = shard(stored.id.step, stored.rank, 3, extras=extras)
        assert np.array_equal(contract.read_all(tier, stored), memory)
    assert len(tier.shards()) == 6
    assert hidden(place) == []
    with sapwood.store.open(place) as repo:
        repo.flush()
        assert repo.verify().problems == []


def test_a_repository_that_was_removed_is_made_anew(
    tier: VersionTier, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_all(tier)
    shutil.rmtree(place)
    assert list(tier.shards()) == []
    put_all(tier, step=8)
    assert "was removed" in caplog.text
    with closing(VersionTier(place, ORIGIN)) as other:
        assert list(other.shards()) == [Stored(CheckpointId(8, ATTEMPT), r) for r in range(2)]
        contract.read_all(other, Stored(CheckpointId(8, ATTEMPT), 1))


def test_a_version_that_says_it_is_another_checkpoint_is_damage(
    tier: VersionTier, place: str
) -> None:
    put_all(tier, 1)
    with closing(sqlite3.connect(Path(place, "catalog.db"))) as db:
        db.execute("UPDATE model SET note = replace(note, ?, ?)", (str(ID), f"00000009-{ATTEMPT}"))
        db.commit()
    with pytest.raises(Misplaced, match="was written as shard 0 of checkpoint 00000007"):
        open_checked(tier, Stored(CheckpointId(9, ATTEMPT), 0))


@pytest.mark.parametrize("note", [{"checkpoint": 3}, {"checkpoint": {"id": "x"}}, {"shard": []}])
def test_what_others_note_is_not_taken_for_a_checkpoint(
    tier: VersionTier, place: str, note: dict[str, object]
) -> None:
    with sapwood.store.open(place) as repo:
        repo.save({"w": torch.zeros(3)}, "nt3/run7@step-7", note=note)
    assert list(tier.shards()) == []
    put_all(tier)
    assert versions(place) == ["nt3/run7@step-7", f"nt3/run7@step-7-{ATTEMPT}"]


def test_a_name_that_is_taken_twice_is_said(tier: VersionTier, place: str) -> None:
    with sapwood.store.open(place) as repo:
        for version in ("step-7", f"step-7-{ATTEMPT}"):
            repo.save({"w": torch.zeros(3)}, f"nt3/run7@{version}")
    with pytest.raises(TierError, match="give this training a name of its own"):
        put_all(tier, 1)


def test_damage_is_named(tier: VersionTier, place: str) -> None:
    put_all(tier, 1)
    for path in Path(place, "packs").rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[0] ^= 1
            path.write_bytes(content)
    with closing(tier.open(Stored(ID, 0))) as found, pytest.raises(CheckpointError, match="large"):
        verify(found)
