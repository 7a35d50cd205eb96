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
        assert "equal tensors are not merged for now" in caplog.text
