"""Nodes that keep for each other: a lost node's shards come back from the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.errors import RankError
from sapwood.testing import ranks
from tests.checkpoint.training import Training, same

STEPS = 4
State = dict[str, torch.Tensor]


def own_node(rank: int) -> dict[str, str]:
    return {"SAPWOOD_NODE": f"node{rank}"}


def work(folder: Path, tiers: tuple[str, ...], engine: str, until: int) -> tuple[int, State]:
    """Go on from what is there, up to a step; where it began and what it came to."""
    settings: dict[str, Any] = {"engine": engine, "linger": 0.0, "mode": "lazy"}
    training = Training(folder)
    with sapwood.Checkpointer(
        training.run, folder / "ckpts", tiers=tiers, every=2, **settings
    ) as c:
        loaded = c.restore_latest()
        began = 0 if loaded is None else loaded.id.step
        training.steps(until)
        c.wait()
        assert not any(save.failed for save in c.stats.saves)
    state = training.state()
    training.close()
    return began, state


def undisturbed(folder: Path, until: int) -> dict[int, State]:
    training = Training(folder)
    states = {}
    for step in range(1, until + 1):
        training.step()
        states[step] = training.state()
    training.close()
    return states


def work_alone(folder: Path, until: int) -> list[dict[int, State]]:
    """The states of three ranks that never stop, by step."""
    return ranks.spawn(undisturbed, 3, folder, until)


def wipe(folder: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(folder / "ckpts" / "nodes" / f"node{node}")


@pytest.mark.parametrize("engine", ["node", "sync"])
def test_a_lost_node_comes_back_from_its_partner(tmp_path: Path, engine: str) -> None:
    tiers = ("local", "partner")
    first = ranks.spawn(work, 3, tmp_path, tiers, engine, STEPS, env=own_node)
    wipe(tmp_path, 1)
    again = ranks.spawn(work, 3, tmp_path, tiers, engine, STEPS, env=own_node)
    for (_, state), (began, restored) in zip(first, again, strict=True):
        assert began == STEPS
        assert same(state, restored)


def test_two_partners_lost_at_once_are_too_many(tmp_path: Path) -> None:
    tiers = ("local", "partner")
    ranks.spawn(work, 3, tmp_path, tiers, "node", STEPS, env=own_node)
    wipe(tmp_path, 0, 1)
    with pytest.raises(RankError, match=r"no tier has the shards of ranks \[0\]"):
        ranks.spawn(work, 3, tmp_path, tiers, "node", STEPS, env=own_node)


def test_any_node_of_a_parity_group_may_be_lost(tmp_path: Path) -> None:
    tiers = ("local", "parity:2+1")
    expected = work_alone(tmp_path / "alone", STEPS + 4)
    ranks.spawn(work, 3, tmp_path, tiers, "node", STEPS, env=own_node)
    for lost, begins in ((0, STEPS), (2, STEPS + 2)):
        wipe(tmp_path, lost)
        again = ranks.spawn(work, 3, tmp_path, tiers, "node", begins + 2, env=own_node)
        for rank, (began, state) in enumerate(again):
            assert began == begins
            assert same(state, expected[rank][begins + 2])


@pytest.mark.parametrize(("tiers", "lost"), [("local partner", (1, 0)), ("parity:2+1", (0, 2))])
def test_what_a_lost_node_kept_is_made_anew_when_it_comes_back(
    tmp_path: Path, tiers: str, lost: tuple[int, int]
) -> None:
    """Without another checkpoint in between, two nodes that go together go one after the other."""
    kinds = (*(t if "2+1" not in t else f"{t}:{tmp_path}/ckpts/nodes" for t in tiers.split()),)
    first = ranks.spawn(work, 3, tmp_path, kinds, "sync", STEPS, env=own_node)
    for node in lost:
        wipe(tmp_path, node)
        again = ranks.spawn(work, 3, tmp_path, kinds, "sync", STEPS, env=own_node)
        for (_, state), (began, restored) in zip(first, again, strict=True):
            assert began == STEPS
            assert same(state, restored)
