"""What a run killed in mid-save left goes later; what somebody may still write to stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.retention import last
from sapwood.tiers.base import Stored
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.leftovers import Clearable, Stale
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId
from tests.storage.dying import dies
from tests.tiers.crash import KINDS, NEW, OLD, check, drafts, given, put_all, tier_in
from tests.tiers.nodes import cluster
from tests.tiers.shards import ATTEMPT, shard

OTHER = "ffff00"
STALE = Stale(attempt=OTHER, step=9)
HOUR = 3600.0


def age(folder: Path, seconds: float) -> None:
    """As if nothing in it had changed for so long; the folder itself was written to just now."""
    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def half_saved(place: Path, attempt: str = ATTEMPT, step: int = 5) -> Path:
    """A partial folder with the record of one rank of two."""
    ExternalTier(place).put(*shard(step, 0, 2, attempt=attempt))
    return place / f"{step:08d}-{attempt}.partial"


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_operation_leaves_nothing_for_good(tmp_path: Path, kind: str) -> None:
    at, killed, found = 0, True, 0
    while killed:
        at += 1
        folder = tmp_path / str(at)
        tier = tier_in(kind, folder)
        put_all(tier, OLD)
        tier.put(*given(NEW, 0, tier))
        killed, _ = dies(lambda _, tier=tier: tier.put(*given(NEW, 1, tier)), at, folder)
        before = list(tier.shards())
        assert isinstance(tier, Clearable)
        assert tier.clear(STALE) == []  # whoever wrote it may still be at it
        age(folder, 2 * HOUR)
        found += bool(tier.clear(STALE))
        after = check(tier, [Stored(OLD, 0), Stored(OLD, 1)])
        assert drafts(folder) == []
        if kind == "external":
            assert after == (before if Stored(NEW, 1) in before else before[:2])
            assert not list(folder.glob("*.partial"))
        else:
            assert after == before
            files = [path.name for path in (folder / NEW.folder).iterdir()]
            assert Stored(NEW, 1) in after or not [n for n in files if n.startswith("shard-1")]
        shutil.rmtree(folder)
    assert found > 3


@pytest.mark.parametrize(
    ("stale", "untouched"),
    [
        (Stale(attempt=ATTEMPT, step=9), 2 * HOUR),  # its own
        (Stale(attempt=OTHER, step=4), 2 * HOUR),  # no whole one is as new
        (Stale(attempt=OTHER, step=9), 0.9 * HOUR),  # somebody may be at it
    ],
)
def test_what_may_still_be_written_stays(tmp_path: Path, stale: Stale, untouched: float) -> None:
    partial = half_saved(tmp_path)
    age(tmp_path, untouched)
    assert ExternalTier(tmp_path).clear(stale) == []
    assert (partial / "shard-0.json").exists()


def test_one_file_that_changes_tells_that_its_writer_lives(tmp_path: Path) -> None:
    partial = half_saved(tmp_path)
    age(tmp_path, 2 * HOUR)
    os.utime(partial / "model.safetensors")
    assert ExternalTier(tmp_path).clear(STALE) == []


def test_a_file_server_whose_clock_is_behind(tmp_path: Path) -> None:
    """What is a minute old by its clock is a minute old, whatever ours says."""
    half_saved(tmp_path)
    age(tmp_path, 5 * HOUR)
    os.utime(tmp_path, (time.time() - 5 * HOUR + 60,) * 2)
    assert ExternalTier(tmp_path).clear(STALE) == []


def test_a_complete_one_is_published_and_not_removed(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path)
    put_all(tier, OLD)
    (tmp_path / OLD.folder / "manifest.json").unlink()
    (tmp_path / OLD.folder).rename(tmp_path / f"{OLD.folder}.partial")
    age(tmp_path, 2 * HOUR)
    assert tier.clear(STALE) == []
    tier.check(OLD)


def test_files_nobody_knows_stay(tmp_path: Path) -> None:
    home = tmp_path / OLD.folder
    home.mkdir()
    (home / "notes.txt").write_text("mine")
    (home / "shard-3.bin").write_text("no record")
    age(tmp_path, 2 * HOUR)
    assert LocalTier(tmp_path).clear(STALE) == [OLD]
    assert [path.name for path in home.iterdir()] == ["notes.txt"]


def test_on_nodes_that_keep_for_each_other(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        record, memory = shard(5, 0, 3)
        nodes.parity("a", "2+1").put(record, memory)
        nodes.partner("a").put(record, memory)
        homes = [tmp_path / "b" / area / record.id.folder for area in ("parity", "partner")]
        for home in homes:
            (home / ".shard-1.bin.draft-12-ab").write_text("half")
            (home / "shard-2.bin").write_text("no record")
        age(tmp_path / "b" / "parity", 2 * HOUR)
        age(tmp_path / "b" / "partner", 2 * HOUR)
        for tier in (nodes.parity("b", "2+1"), nodes.partner("b")):
            assert tier.clear(STALE) == [record.id]
            assert list(tier.shards()) == [Stored(record.id, 0)]
        for home in homes:
            assert len(list(home.iterdir())) == 2


# -- as part of pruning ----------------------------------------------------------------------


def test_the_pruner_clears_up_after_the_dead_and_not_after_itself(tmp_path: Path) -> None:
    dead, own = half_saved(tmp_path), half_saved(tmp_path, OTHER, 6)
    tier = ExternalTier(tmp_path)
    tier.put(*shard(7, 0, 1, attempt=OTHER))
    age(tmp_path, 2 * HOUR)
    pruner = Pruner(tier, last(2), lambda id, name: tier.drop(id))
    pruner.whole(CheckpointId(7, OTHER), 1.0, {})
    assert not dead.exists()
    assert own.exists()


def test_what_is_not_whole_does_not_take_a_place(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path)
    tier.put(*shard(4, 0, 1))
    young = half_saved(tmp_path)
    tier.put(*shard(6, 0, 1, attempt=OTHER))
    pruner = Pruner(tier, last(2), lambda id, name: tier.drop(id))
    pruner.whole(CheckpointId(6, OTHER), 6.0, {})
    assert {s.id.step for s in tier.shards()} == {4, 5, 6}
    assert young.exists()
