"""How gradients are averaged is told: in run.toml, in the trace, and by refusals."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood
from sapwood.errors import ConfigError
from sapwood.testing import ranks
from sapwood.trace.read import Instant, read_trace


def told(folder: Path, **settings: Any) -> tuple[str, str]:
    """What run.toml says, after checking that every rank's trace says the same."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, folder=folder, trace=True, **settings) as run:
        run.model(torch.ones(1, 2)).sum().backward()
        run.step()
    layout = tomllib.loads((run.folder / "run.toml").read_text())["layout"]
    said = layout["averaging"], layout["averaging_reason"]
    traced = [
        (record.args["way"], record.args["reason"])
        for record in read_trace(run.folder / "trace").records
        if isinstance(record, Instant) and record.name == "averaging" and record.rank == run.rank
    ]
    assert traced == [said]
    return said


def tell_all(folder: Path) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigError, match="engine='ddp'"):
        told(folder, engine="ddp", averaging="node")
    return {
        "auto": told(folder),
        "direct": told(folder, averaging="direct"),
        "ddp": told(folder, engine="ddp"),
    }


def test_two_ranks_tell_which_way_and_why(tmp_path: Path) -> None:
    for said in ranks.spawn(tell_all, 2, tmp_path, timeout=100):
        assert said["auto"] == ("node", "1 machine: 0-1")
        assert said["direct"] == ("direct", "asked for")
        assert said["ddp"] == ("direct", "DistributedDataParallel sends its own all-reduce")


def test_one_rank_tells_that_there_is_nothing_to_average(tmp_path: Path) -> None:
    assert told(tmp_path) == ("direct", "one rank has nothing to average")
