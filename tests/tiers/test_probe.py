"""Looking at the storage there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.errors import TierError
from sapwood.tiers.probe import Storage, best_local, look_at, usual_places

MB = 2**20


def storage(folder: Path, kind: str, speed: float) -> Storage:
    return Storage(folder=folder, filesystem="x", kind=kind, free=0, bytes_per_second=speed)


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "new"
    found = look_at(place, seconds=0.01, limit=4 * MB)
    assert found.bytes_per_second > 0
    assert found.free > 0
    assert found.kind in ("disk", "memory", "network")
    assert list(place.iterdir()) == []


def test_memory_is_not_a_disk() -> None:
    assert look_at(Path("/dev/shm"), seconds=0.01, limit=4 * MB).kind == "memory"


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="cannot write"):
        look_at(tmp_path / "file")


def test_only_places_that_are_there(tmp_path: Path) -> None:
    given = {"TMPDIR": str(tmp_path), "SLURM_TMPDIR": str(tmp_path / "no"), "PBS_JOBFS": ""}
    assert usual_places(given)[0] == tmp_path
    assert tmp_path / "no" not in usual_places(given)


def test_a_network_place_gets_a_disk_beside_it(tmp_path: Path) -> None:
    kind = look_at(tmp_path, seconds=0.01, limit=4 * MB).kind
    home = storage(tmp_path, "network", 1e15)
    found = best_local(home, [tmp_path / "a", Path("/dev/shm")], need=1, seconds=0.01)
    assert (found is not None and found.folder == tmp_path / "a") == (kind == "disk")


def test_a_disk_that_is_no_faster_or_too_small_is_not_worth_it(tmp_path: Path) -> None:
    fast = storage(tmp_path, "disk", 1e15)
    assert best_local(fast, [tmp_path], need=1, seconds=0.01) is None
    slow = storage(tmp_path, "disk", 1.0)
    assert best_local(slow, [tmp_path], need=2**62, seconds=0.01) is None
