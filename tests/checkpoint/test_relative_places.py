"""Relative places are those of the process that made the Checkpointer, for every tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sapwood
from sapwood.checkpoint.settings import tier_specs
from sapwood.errors import ConfigError
from sapwood.testing import ranks
from tests.checkpoint.training import Training

TIERS = ("local:scratch", "partner:kept", "parity:1+1:kept", "external:ckpts")


def test_every_folder_becomes_absolute(tmp_path: Path) -> None:
    specs = {spec.kind: spec.place for spec in tier_specs("ckpts", ("memory", *TIERS))}
    assert specs == {
        "memory": "",
        "local": str(tmp_path / "scratch"),
        "partner": str(tmp_path / "kept"),
        "parity": f"1+1:{tmp_path / 'kept'}",
        "external": str(tmp_path / "ckpts"),
    }
    defaults = tier_specs("ckpts", ("local", "partner", "parity", "external"))
    nodes = tmp_path / "ckpts" / "nodes"
    assert [s.place for s in defaults] == [
        str(nodes),
        str(nodes),
        f"4+2:{nodes}",
        f"{nodes.parent}",
    ]
    assert tier_specs("s3://bucket/x", ("s3",))[0].place == "s3://bucket/x"


@pytest.mark.parametrize("tier", ["local", "partner", "parity", "parity:2+1", "external"])
def test_a_bucket_is_no_folder(tier: str) -> None:
    with pytest.raises(ConfigError, match="give the tier a folder"):
        tier_specs("s3://bucket/x", (tier, "s3"))


def train(folder: Path, elsewhere: Path, until: int) -> int | None:
    os.chdir(folder)
    training = Training(folder)
    with sapwood.Checkpointer(training.run, "ckpts", tiers=TIERS, every=2, linger=0.0) as c:
        os.chdir(elsewhere)  # as a script may do that works in a folder of its own
        restored = c.restore_latest()
        training.steps(until)
        c.wait()
        assert not any(save.failed for save in c.stats.saves)
    training.close()
    return restored.step if restored else None


def test_engines_and_ranks_mean_the_same_folders(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    elsewhere.mkdir()
    own_node = lambda number: {"SAPWOOD_NODE": f"n{number}"}  # noqa: E731
    assert ranks.spawn(train, 2, folder, elsewhere, 2, env=own_node) == [None, None]
    assert ranks.spawn(train, 2, folder, elsewhere, 4, env=own_node) == [2, 2]
    assert {p.name for p in folder.iterdir()} == {"runs", "scratch", "kept", "ckpts"}
    assert list((folder / "kept").glob("n*/kept/partner/00000004-*/shard-*.json"))
    assert list((folder / "kept").glob("n*/kept/parity/00000004-*/shard-*.json"))
    assert list(elsewhere.iterdir()) == []
