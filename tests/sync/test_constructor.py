"""A Run that cannot be made: its folder says so, and nothing of it stays on the model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood
from sapwood import run as module
from sapwood.errors import PeerFailed, RunFolderError
from sapwood.testing import ranks


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no room for this")


def make(folder: Path, **settings: Any) -> sapwood.Run:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sapwood.Run(model, optimizer, folder=folder, **settings)


def statuses(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*/status.json"))]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sapwood")]


@pytest.mark.parametrize("place", ["make_engine", "attach", "Stopping", "open_trace"])
def test_the_folder_says_that_it_failed_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = threads()
    owner: Any = {"attach": sapwood.sync.layerwise.Layerwise, "open_trace": module.tracing}
    monkeypatch.setattr(owner.get(place, module), place, fail)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no room"):
        sapwood.Run(model, optimizer, folder=tmp_path, trace=True)
    (status,) = statuses(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 0)
    assert status["error"] == "RuntimeError: no room for this"
    assert threads() == before
    monkeypatch.undo()
    with sapwood.Run(model, optimizer, folder=tmp_path) as run:  # nothing holds the model
        run.model(torch.ones(1, 2)).sum().backward()
        run.step()


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    with make(tmp_path, id="taken"):
        with pytest.raises(RunFolderError, match="already holds a run"):
            make(tmp_path, id="taken")
        assert [s["state"] for s in statuses(tmp_path)] == ["running"]
    assert [s["state"] for s in statuses(tmp_path)] == ["ended"]


def train(folder: Path) -> None:
    with make(folder, timeout=100) as run:
        run.model(torch.ones(1, 2)).sum().backward()
        run.step()


def fail_on(where: int, folder: Path) -> None:
    if ranks.rank() == where:
        module.make_engine = fail
    with pytest.raises((RuntimeError, PeerFailed), match="no room"):
        train(folder / str(where))
    module.make_engine = sapwood.sync.make_engine


def each_fails(folder: Path) -> None:
    fail_on(0, folder)
    fail_on(1, folder)


def test_two_ranks_of_which_one_fails(tmp_path: Path) -> None:
    ranks.spawn(each_fails, 2, tmp_path)
    (first,), (second,) = statuses(tmp_path / "0"), statuses(tmp_path / "1")
    assert first["state"] == second["state"] == "failed"
    assert first["error"] == "RuntimeError: no room for this"
    assert second["error"].startswith("PeerFailed: ")
    assert "rank 1 failed: RuntimeError: no room for this" in second["error"]
