"""What others do between two steps of a save or a gc, and what a power cut may do after them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood.store
from sapwood.repository.catalog import Catalog
from sapwood.repository.sweeping import _remove_orphans as _orphans


def _between(monkeypatch: pytest.MonkeyPatch, name: str, other: Callable[[], Any]) -> None:
    """Let another process do something just before a change of the catalog, once."""
    change = getattr(Catalog, name)
    left = [other]

    def changed(self: Catalog, *values: Any, **more: Any) -> Any:
        if left:
            left.pop()()
        return change(self, *values, **more)

    monkeypatch.setattr(Catalog, name, changed)


def test_gc_that_takes_a_pack_on_its_way_for_an_orphan_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        sapwood.store.open(tmp_path / "models") as repo,
        sapwood.store.open(tmp_path / "models") as other,
    ):
        _between(monkeypatch, "add", lambda: other.gc(quiet=0))
        weight = torch.randn(5000)
        repo.save({"w": weight}, "a@1")
        assert torch.equal(repo.load("a@1")["w"], weight)
        assert repo.verify().problems == []


def test_two_gcs_do_not_take_each_others_packs_for_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        sapwood.store.open(tmp_path / "models") as repo,
        sapwood.store.open(tmp_path / "models") as other,
    ):
        weight = torch.randn(5000)
        repo.save({"w": weight, "much": torch.randn(50_000)}, "a@1")
        repo.save({"w": weight}, "a@2", parent="a@1")
        repo.remove("a@1")
        repo.flush()
        backend = other._backend  # whose gc has looked for packs to rewrite before
        _between(monkeypatch, "move", lambda: _orphans(backend.catalog, backend.keeper, 0))  # type: ignore[attr-defined]
        repo.gc(quiet=0)
        assert torch.equal(repo.load("a@2")["w"], weight)
        assert repo.verify().problems == []


def test_a_version_goes_whose_blobs_hold_each_other(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    with sapwood.store.open(tmp_path / "models") as repo:
        first = torch.randn(5000)
        second = first + torch.randn(5000) * 1e-5
        repo.save({"a": first, "b": second}, "both@1")
        repo.save({"b": second}, "before@1", parent="both@1")
        repo.save({"b": first}, "after@1", parent="before@1")
        assert repo.cool("after").tensors == 1  # an older blob gets a younger one as its base
        repo.remove("before@1")
        repo.remove("after@1")
        repo.remove("both@1")
        assert repo.verify().problems == []
        assert repo.gc(quiet=0).live == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_version_that_is_synced_syncs_what_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    folder = tmp_path / "models"
    with sapwood.store.open(folder, shared=shared) as repo:
        if repo._backend.keeper.durability.name != "SYNCED":  # type: ignore[attr-defined]
            pytest.skip("a tmpfs promises no more than WRITTEN")
        weight = torch.randn(5000)
        repo.save({"w": weight}, "a@1", durability="written")
        (pack,) = (path for path in (folder / "packs").rglob("*") if path.is_file())
        synced = _synced(monkeypatch)
        repo.save({"w": weight}, "a@2", parent="a@1", durability="synced")
        assert pack.stat().st_ino in synced
        assert pack.parent.stat().st_ino in synced


def test_what_was_synced_is_merged_only_into_what_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    with sapwood.store.open(folder) as repo:
        if repo._backend.keeper.durability.name != "SYNCED":  # type: ignore[attr-defined]
            pytest.skip("a tmpfs promises no more than WRITTEN")
        weight = torch.randn(5000)
        repo.save({"w": weight}, "a@1", durability="written")
        repo.flush()
        (pack,) = (path for path in (folder / "packs").rglob("*") if path.is_file())
        synced = _synced(monkeypatch)
        repo.save({"w": weight}, "b@1", durability="synced")
        repo.flush()
        assert pack.stat().st_ino in synced
        assert repo.gc(quiet=0).live == weight.nbytes


@pytest.mark.parametrize("shared", [False, True])
def test_packs_that_gc_rewrites_are_synced_before_the_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    folder = tmp_path / "models"
    with sapwood.store.open(folder, shared=shared) as repo:
        if repo._backend.keeper.durability.name != "SYNCED":  # type: ignore[attr-defined]
            pytest.skip("a tmpfs promises no more than WRITTEN")
        weight = torch.randn(5000)
        repo.save({"w": weight, "x": torch.randn(50_000)}, "a@1", durability="synced")
        repo.save({"w": weight}, "a@2", parent="a@1", durability="synced")
        repo.remove("a@1")
        repo.flush()
        synced = _synced(monkeypatch)
        repo.gc(quiet=0)
        (pack,) = (path for path in (folder / "packs").rglob("*") if path.is_file())
        assert pack.stat().st_ino in synced
        assert torch.equal(repo.load("a@2")["w"], weight)


def _synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the files that are synced from now on."""
    found: set[int] = set()
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd: int, real: Callable[[int], None] = real) -> None:
            found.add(os.fstat(fd).st_ino)
            real(fd)

        monkeypatch.setattr(os, name, sync)
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_beside_a_thread_that_writes_can_read_and_save(tmp_path: Path) -> None:
    with sapwood.store.open(tmp_path / "models") as repo:
        repo.save({"w": torch.ones(100)}, "a@1")
        repo.flush()
        backend = repo._backend
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with backend.database.reading(), backend._merger._lock:  # type: ignore[attr-defined]
                inside.set()
                leave.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(60)
        try:
            child = os.fork()
            if not child:
                signal.alarm(60)  # a lock that nobody releases would be waited for without end
                try:
                    with repo:
                        assert repo.load("a@1")["w"].sum() == 100
                        repo.save({"w": torch.zeros(100)}, "b@1")
                    os._exit(0)
                except BaseException:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            leave.set()
            thread.join()
        assert repo.load("b@1")["w"].sum() == 0
