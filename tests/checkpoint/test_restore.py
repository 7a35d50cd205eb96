"""Restoring from what is left: private disks, damaged copies, missing nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.errors import CheckpointError, RankError
from sapwood.testing import ranks
from tests.checkpoint.training import Training, same

STEPS = 4
SETTINGS: dict[str, Any] = {"engine": "sync", "keep": None, "mode": "lazy"}
LOCAL = ("local",)
BOTH = ("local", "external")
State = dict[str, torch.Tensor]


def own_node(rank: int) -> dict[str, str]:
    return {"SAPWOOD_NODE": f"node{rank}"}


def train(folder: Path, tiers: tuple[str, ...]) -> list[State]:
    """The states after each step; every second step is saved."""
    training = Training(folder)
    states = []
    with sapwood.Checkpointer(training.run, folder / "ckpts", tiers=tiers, every=2, **SETTINGS):
        for _ in range(STEPS):
            training.step()
            states.append(training.state())
    training.close()
    return states


def restore(folder: Path, tiers: tuple[str, ...]) -> tuple[int, State, tuple[str, ...], tuple]:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", tiers=tiers, **SETTINGS) as c:
        loaded = c.restore_latest()
        assert loaded is not None
    state = training.state()
    training.close()
    return loaded.id.step, state, loaded.tiers, loaded.skipped


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x40
    path.write_bytes(content)


def shard_file(folder: Path, node: int, step: int, suffix: str = "bin") -> Path:
    (found,) = (folder / "ckpts" / "nodes" / f"node{node}").glob(f"{step:08d}-*")
    return found / f"shard-{node}.{suffix}"


def test_disks_that_only_their_own_node_sees(tmp_path: Path) -> None:
    trained = ranks.spawn(train, 3, tmp_path, LOCAL, env=own_node)
    for rank, (step, state, tiers, skipped) in enumerate(
        ranks.spawn(restore, 3, tmp_path, LOCAL, env=own_node)
    ):
        assert (step, tiers, skipped) == (STEPS, ("local",), ())
        assert same(state, trained[rank][-1])


DAMAGE: list[Callable[[Path], object]] = [flip, lambda p: p.write_bytes(b""), Path.unlink]


@pytest.mark.parametrize("suffix", ["bin", "json"])
@pytest.mark.parametrize("damage", DAMAGE, ids=["flipped", "emptied", "removed"])
def test_a_damaged_shard_on_one_node_makes_all_go_back_together(
    tmp_path: Path, damage: Callable[[Path], object], suffix: str
) -> None:
    trained = ranks.spawn(train, 2, tmp_path, LOCAL, env=own_node)
    damage(shard_file(tmp_path, 1, 4, suffix))
    for rank, (step, state, _, skipped) in enumerate(
        ranks.spawn(restore, 2, tmp_path, LOCAL, env=own_node)
    ):
        assert step == 2
        assert same(state, trained[rank][1])
        assert any("00000004" in note for note in skipped)


def test_a_damaged_copy_is_replaced_by_one_of_another_tier(tmp_path: Path) -> None:
    trained = ranks.spawn(train, 2, tmp_path, BOTH, env=own_node)
    flip(shard_file(tmp_path, 0, 4))
    for rank, (step, state, tiers, skipped) in enumerate(
        ranks.spawn(restore, 2, tmp_path, BOTH, env=own_node)
    ):
        assert step == STEPS
        assert same(state, trained[rank][-1])
        assert set(tiers) <= {"local", "external"}
        assert len(skipped) == 1
        assert "do not match their checksum" in skipped[0]


def test_a_node_that_is_gone(tmp_path: Path) -> None:
    ranks.spawn(train, 2, tmp_path, LOCAL, env=own_node)
    with pytest.raises(RankError, match=r"no tier has the shards of ranks \[1\]"):
        ranks.spawn(restore, 1, tmp_path, LOCAL, env=own_node)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, tmp_path / "ckpts", every=2, **SETTINGS) as c:
        assert c.restore_latest() is None
        with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
            c.restore(7)
        training.steps(4)
        with pytest.raises(CheckpointError, match=r"step 7 .*\[2, 4\]"):
            c.restore(7)
    training.close()


def test_tiers_found_by_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sapwood.checkpoint import choose
    from sapwood.tiers.probe import Storage

    def look_at(folder: Path) -> Storage:
        return Storage(
            folder=folder, filesystem="nfs4", kind="network", free=10**12, bytes_per_second=1.0
        )

    monkeypatch.setattr(choose, "look_at", look_at)
    monkeypatch.setenv("SAPWOOD_LOCAL", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", tiers="auto", every=2, **SETTINGS
    ) as c:
        kinds = [spec.kind for spec in c.specs]
        training.steps(2)
        state = training.state()
        training.steps(3)
        loaded = c.restore_latest()
        assert loaded is not None
        assert same(training.state(), state)
    training.close()
    assert kinds in (["memory", "local", "external"], ["memory", "external"])
    if "local" in kinds:  # else the test's folder itself is not on a disk
        assert loaded.tiers == ("local",)


def begin(folder: Path, tiers: tuple[str, ...]) -> int:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, folder / "ckpts", tiers=tiers, **SETTINGS) as c:
        found = c.restore_latest()
    training.close()
    return 0 if found is None else found.id.step


def test_where_only_a_first_save_was_interrupted_nothing_was(tmp_path: Path) -> None:
    """All shards would be seen in a shared folder: a run that restarts by itself begins anew."""
    ranks.spawn(train, 2, tmp_path, ("external",))
    for path in (tmp_path / "ckpts").glob("0*"):
        (path / "shard-1.json").unlink()
        path.rename(path.with_name(path.name + ".partial"))
    assert ranks.spawn(begin, 2, tmp_path, ("external",)) == [0, 0]


def test_what_is_missing_on_a_nodes_own_disk_may_have_been_lost(tmp_path: Path) -> None:
    ranks.spawn(train, 2, tmp_path, LOCAL, env=own_node)
    for step in (2, 4):
        shard_file(tmp_path, 1, step, "json").unlink()
    with pytest.raises(RankError, match="no checkpoint is whole"):
        ranks.spawn(begin, 2, tmp_path, LOCAL, env=own_node)
