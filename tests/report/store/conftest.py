"""A repository with some history, its page, and who asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

import sapwood.store
from sapwood.report.store import Serving
from sapwood.store import Repository

TOKEN = "a-token-of-some-length"


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with sapwood.store.open(tmp_path / "models") as opened:
        yield opened


@pytest.fixture
def family(repo: Repository) -> Repository:
    """``a@1`` and what comes from it: ``a@2`` with other biases, ``b@1``, and a stranger."""
    torch.manual_seed(0)
    first = {"conv.weight": torch.randn(8, 4, 3, 3), "conv.bias": torch.randn(8)}
    repo.save(first, "a@1", metrics={"acc": 0.5}, note={"epoch": 1})
    second = {**first, "conv.bias": torch.randn(8)}
    repo.save(second, "a@2", parent="a@1", metrics={"acc": 0.9}, tags=["best"])
    repo.save({**second, "head": torch.zeros(3)}, "b@1", parent="a@2")
    repo.save({"x": torch.arange(4)}, "dir/stranger")
    repo.flush()
    return repo


@pytest.fixture
def serving(repo: Repository) -> Iterator[Serving]:
    with Serving(repo, place="models", token=TOKEN) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=20, trust_env=False) as opened:
        yield opened
