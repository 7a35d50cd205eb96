"""Versions that were saved as ``synced`` are there after a cut of power, whatever came later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sapwood.store import Repository
from sapwood.store import open as open_repository
from tests.repository.disks import cut, missing, mounted, new_disk

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SIZE = 50_000


class Machine:
    """A repository on a disk, and what it owes."""

    def __init__(self, folder: Path, shared: bool) -> None:
        self.folder, self.shared = folder, shared
        self.image = folder / "disk"
        new_disk(self.image)
        self.owed: dict[str, dict[str, Tensor]] = {}
        self.cuts = 0

    def save(self, repo: Repository, name: str, value: dict[str, Tensor], **more: str) -> None:
        repo.save(value, name, **more)
        if more.get("durability") == "synced":
            self.owed[name] = {key: tensor.clone() for key, tensor in value.items()}

    def cut(self) -> None:
        """Look what would be left, and find it right."""
        self.cuts += 1
        copy = cut(self.image, self.folder / "copy")
        with (
            mounted(copy, self.folder / "found") as found,
            open_repository(found / "models", create=False) as repo,
        ):
            for name, expected in self.owed.items():
                loaded = repo.load(name)
                assert loaded.keys() == expected.keys()
                for key in expected:
                    assert torch.equal(loaded[key], expected[key]), f"{name}: {key}"


@pytest.fixture(params=["database", "shared"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, shared=request.param == "shared")


@pytest.fixture
def disk(machine: Machine, tmp_path: Path) -> Iterator[Repository]:
    with (
        mounted(machine.image, tmp_path / "disk-in-use") as folder,
        open_repository(folder / "models", shared=machine.shared) as repo,
    ):
        yield repo


def fresh(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def test_what_was_synced_is_there(machine: Machine, disk: Repository) -> None:
    for number in range(3):
        machine.save(disk, f"m@{number}", {"a": fresh(number)}, durability="synced")
        machine.cut()


def test_what_a_synced_version_shares_is_synced_too(machine: Machine, disk: Repository) -> None:
    frozen = fresh(0)
    machine.save(disk, "parent@1", {"frozen": frozen, "head": fresh(1)})
    child = {"frozen": frozen, "head": fresh(2)}
    machine.save(disk, "child@1", child, parent="parent@1", durability="synced")
    machine.cut()


def test_merging_leaves_nothing_less_safe(machine: Machine, disk: Repository) -> None:
    equal = fresh(0)
    machine.save(disk, "quick@1", {"a": equal})
    disk.flush()
    machine.save(disk, "safe@1", {"b": equal.clone()}, durability="synced")
    disk.flush()
    disk.gc()
    machine.cut()
    machine.save(disk, "later@1", {"c": fresh(9)}, durability="synced")
    machine.cut()


def test_gc_leaves_nothing_less_safe(machine: Machine, disk: Repository) -> None:
    kept = fresh(0)
    first = {"kept": kept, **{f"gone{n}": fresh(n) for n in range(1, 6)}}
    machine.save(disk, "m@1", first, durability="synced")
    machine.save(disk, "m@2", {"kept": kept}, parent="m@1", durability="synced")
    disk.flush()
    del machine.owed["m@1"]
    disk.remove("m@1")
    machine.cut()
    assert disk.gc(quiet=0).freed > 0
    machine.cut()
    machine.save(disk, "later@1", {"c": fresh(9)}, durability="synced")
    machine.cut()


def test_a_removal_that_power_undoes_undoes_nothing_else(
    machine: Machine, disk: Repository
) -> None:
    machine.save(disk, "m@1", {"a": fresh(1)}, durability="synced")
    machine.save(disk, "m@2", {"a": fresh(2)}, durability="synced")
    disk.flush()
    del machine.owed["m@1"]
    disk.remove("m@1")
    disk.gc(quiet=0)
    copy = cut(machine.image, machine.folder / "copy")
    with (
        mounted(copy, machine.folder / "found") as found,
        open_repository(found / "models", create=False) as repo,
    ):
        # Either of both, and whole: a version whose bytes are gone must not come back.
        for record in repo.models():
            repo.load(str(record.reference))
        assert repo.verify().problems == []
