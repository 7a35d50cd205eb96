"""A disk that is really full, a folder that really cannot be written to, and both getting well."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.errors import TierError
from tests.storage.mounts import Mount, in_child
from tests.tiers.crash import KINDS, NEW, OLD, check, drafts, given, put_all, ranks_of, tier_in

# A checkpoint takes about 270 KB: one and a bit fit into the small disk.
SMALL, LARGE = 400 * 1024, 8 * 2**20
FILLING = sorted(KINDS.keys() - {"linked"})  # its second shard takes hardly any room


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.mark.parametrize("kind", FILLING)
def test_a_full_disk(kind: str, folder: Path) -> None:
    def work(mount: Mount) -> None:
        tier = tier_in(kind, folder)
        put_all(tier, OLD)
        for _ in range(3):
            with pytest.raises(TierError, match="No space left on device"):
                put_all(tier, NEW)
            check(tier, ranks_of(OLD))
            assert drafts(folder) == []
        mount.change(nbytes=LARGE)
        put_all(tier, NEW)
        check(tier, ranks_of(OLD) + ranks_of(NEW))

    in_child(folder, SMALL, work)


@pytest.mark.parametrize("kind", FILLING)
def test_a_full_disk_gets_well_by_removing_old_checkpoints(kind: str, folder: Path) -> None:
    def work(mount: Mount) -> None:
        tier = tier_in(kind, folder)
        put_all(tier, OLD)
        with pytest.raises(TierError, match="No space left on device"):
            put_all(tier, NEW)
        tier.drop(OLD)
        put_all(tier, NEW)
        assert check(tier, ranks_of(NEW)) == ranks_of(NEW)

    in_child(folder, SMALL, work)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_read_only_folder(kind: str, folder: Path) -> None:
    def work(mount: Mount) -> None:
        tier = tier_in(kind, folder)
        put_all(tier, OLD)
        mount.change(nbytes=LARGE, read_only=True)
        with pytest.raises(TierError, match="Read-only file system"):
            tier.put(*given(NEW, 0, tier))
        with pytest.raises(TierError, match="Read-only file system"):
            tier.drop(OLD)
        assert check(tier, ranks_of(OLD)) == ranks_of(OLD)
        mount.change(nbytes=LARGE)
        put_all(tier, NEW)
        tier.drop(OLD)
        assert check(tier, ranks_of(NEW)) == ranks_of(NEW)

    in_child(folder, LARGE, work)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_folder_that_is_read_only_from_the_start(kind: str, folder: Path) -> None:
    def work(mount: Mount) -> None:
        mount.change(nbytes=LARGE, read_only=True)
        tier = tier_in(kind, folder / "new" / "place")
        assert list(tier.shards()) == []
        with pytest.raises(TierError, match="Read-only file system"):
            tier.put(*given(NEW, 0, tier))
        tier.drop(OLD)

    in_child(folder, LARGE, work)
