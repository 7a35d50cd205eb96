"""Hashing beside those who remove what is to be hashed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import sapwood.store
from sapwood.repository.catalog import Catalog


def test_what_is_removed_meanwhile_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sapwood.store.open(tmp_path / "models") as repo:
        monkeypatch.setattr("sapwood.repository.merging.Merger.wake", lambda self: None)
        repo.save({"w": torch.zeros(100)}, "gone@1")
        repo.save({"w": torch.ones(100)}, "there@1")
        repo.save({"w": torch.ones(100)}, "again@1")
        monkeypatch.undo()
        listed = Catalog.unhashed
        removed = []

        def list_then_remove(catalog: Catalog, limit: int = 1000):
            found = listed(catalog, limit)
            if not removed:
                removed.append(repo.remove("gone@1"))
                repo._backend.reclaim()  # type: ignore[attr-defined]
            return found

        monkeypatch.setattr(Catalog, "unhashed", list_then_remove)
        with caplog.at_level(logging.WARNING):
            repo.flush()
        assert removed
        assert not caplog.records
        assert repo.verify().unhashed == 0
        assert repo.gc(quiet=0.0).live == 400


def test_a_pack_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sapwood.store.open(tmp_path / "models") as repo:
        monkeypatch.setattr("sapwood.repository.merging.Merger.wake", lambda self: None)
        repo.save({"w": torch.zeros(100)}, "a@1")
        monkeypatch.undo()
        for path in (tmp_path / "models" / "packs").rglob("*"):
            if path.is_file():
                path.unlink()
        with caplog.at_level(logging.WARNING):
            repo.flush()
        assert "1 tensors cannot be hashed, as they are gone" in caplog.text


@pytest.mark.parametrize("cold", [False, True])
def test_sound_bytes_mend_damaged_ones_and_are_not_lost_with_them(
    tmp_path: Path, cold: bool
) -> None:
    if cold:
        pytest.importorskip("zstandard")
    first = torch.randn(5000)
    weight = first + torch.randn(5000) * 1e-5
    with sapwood.store.open(tmp_path / "models") as repo:
        repo.save({"w": first}, "a@1")
        repo.save({"w": weight}, "a@2", parent="a@1")
        repo.save({"w": weight}, "same@1")
        repo.flush()
        if cold:
            assert repo.cool("a").tensors == 1
            repo.gc(quiet=0)
        damage(tmp_path / "models", repo.open("a@2").manifest.blobs[0])
        assert repo.verify().problems
        # Its parent differs from it now, so that it is written, and found to be equal afterwards.
        repo.save({"w": weight}, "a@3", parent="a@2")
        repo.gc(quiet=0)
        for name in ("a@2", "a@3", "same@1"):
            assert torch.equal(repo.load(name)["w"], weight), name
        assert torch.equal(repo.load("a@1")["w"], first)
        assert repo.verify().problems == []
        for name in ("a@1", "a@2", "same@1"):
            repo.remove(name)
        assert torch.equal(repo.load("a@3")["w"], weight)
        assert repo.verify().problems == []
        repo.remove("a@3")
        assert repo.gc(quiet=0).live == 0


def damage(folder: Path, blob: int) -> None:
    """Change a byte in the middle of where a blob lies."""
    with sapwood.store.open(folder) as repo:
        place = repo._backend.catalog.places([blob], cold=True)[blob]  # type: ignore[attr-defined]
    path = folder / place.pack
    path.chmod(0o600)
    with path.open("r+b") as file:
        at = place.start + place.packed // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_what_differs_from_a_damaged_tensor_is_mended_with_it(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    first = torch.randn(5000)
    second = first + torch.randn(5000) * 1e-5
    with sapwood.store.open(tmp_path / "models") as repo:
        repo.save({"w": first}, "a@1")
        repo.save({"w": second}, "a@2", parent="a@1")
        assert repo.cool("a").tensors == 1
        damage(tmp_path / "models", repo.open("a@1").manifest.blobs[0])
        with pytest.raises(AssertionError):
            assert torch.equal(repo.load("a@2")["w"], second)
        repo.save({"w": first}, "a@3", parent="a@2")
        repo.flush()
        # In a circle, neither of the two could be read any more.
        repo.cool("a")
        for name, weight in (("a@1", first), ("a@2", second), ("a@3", first)):
            assert torch.equal(repo.load(name)["w"], weight), name
        assert repo.verify().problems == []
        repo.remove("a@1")
        repo.remove("a@3")
        assert torch.equal(repo.load("a@2")["w"], second)
        assert repo.verify().problems == []
