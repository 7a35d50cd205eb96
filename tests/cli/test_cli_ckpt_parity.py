"""``sapwood ckpt`` on shards in fragments: the folders of nodes are all below the place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId
from tests.cli.checkpoints import ask, flip, name, save, told
from tests.tiers import contract
from tests.tiers.nodes import Cluster
from tests.tiers.shards import ATTEMPT, shard

PLACE = Path("ckpts/nodes")
WORLD = 2


class Nodes(Cluster):
    """As a run lays them out."""

    def folder(self, name: str) -> Path:
        return self.root / name / "kept"

    def lose(self, *names: str) -> None:
        """They are replaced by empty ones."""
        for each in names:
            shutil.rmtree(self.root / each)
            (self.root / each).mkdir()

    def check(self, *readers: str) -> None:
        for reader in readers:
            tier = self.parity(reader, "2+2")
            for rank in range(WORLD):
                memory = shard(5, rank, WORLD)[1]
                stored = Stored(CheckpointId(5, ATTEMPT), rank)
                assert np.array_equal(contract.read_all(tier, stored), memory)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(PLACE, 5)
    try:
        for rank in range(WORLD):
            made.parity("abcde"[rank], "2+2").put(*shard(5, rank, WORLD))
        yield made
    finally:
        made.close()


def one(capsys) -> dict:
    (row,) = ask(capsys, "ls")
    return row


def test_ls_inspect_and_verify_see_fragments(capsys, nodes: Nodes) -> None:
    row = one(capsys)
    assert (row["state"], row["missing"]) == ("whole", [])
    (place,) = row["places"].values()
    assert (place["tier"], place["shards"]) == ("parity", [0, 1])
    fragments = place["fragments"]["0"]
    assert (fragments["scheme"], fragments["there"], fragments["lost"]) == ("2+2", 4, [])
    assert fragments["nbytes"] >= 2 * len(shard(5, 0, WORLD)[1])
    assert "parity" in told(capsys, "ls")
    assert "4 of 2+2 fragments" in ask(capsys, "inspect", "5")["shards"][0]["places"][0]
    assert "all sound" in told(capsys, "verify")


def test_what_is_lost_is_said(capsys, nodes: Nodes) -> None:
    nodes.lose("b")
    row = one(capsys)
    assert (row["whole"], row["state"]) == (True, "whole, fragments of shards 0, 1 lost")
    (damage,) = ask(capsys, "verify", code=1)["damages"]
    assert "shard 0: fragments [1] of 2+2 are lost" in damage["problem"]
    nodes.lose("c", "d")
    row = one(capsys)
    assert not row["whole"]
    assert "2 are needed" in row["problems"][0]


def test_after_a_repair_as_many_other_nodes_may_be_lost(capsys, nodes: Nodes) -> None:
    nodes.lose("a", "b")
    assert "would write anew" in told(capsys, "repair")
    assert one(capsys)["state"] != "whole"
    told(capsys, "repair", "--yes")
    assert one(capsys)["state"] == "whole"
    assert "nothing to do" in told(capsys, "repair")
    nodes.lose("c", "d")
    nodes.check("a", "e")
    told(capsys, "repair", "--yes")
    nodes.lose("a", "e")
    nodes.check("b", "c")


def test_a_damaged_fragment_is_replaced(capsys, nodes: Nodes) -> None:
    home = PLACE / "a" / "kept" / "parity" / name(5)
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    for suffix in ("bin", "json"):
        (path,) = home.glob(f"shard-0.*.{suffix}")
        flip(path, 20)
        (damage,) = ask(capsys, "verify", code=1)["damages"]
        assert "fragment 0 on node ckpts/nodes/a" in damage["problem"]
        told(capsys, "repair", "--yes")
        assert {path.name: path.read_bytes() for path in home.iterdir()} == before


def test_a_lost_fragment_without_a_node_to_go_to(capsys, nodes: Nodes) -> None:
    for gone in "be":
        shutil.rmtree(PLACE / gone)
    text = told(capsys, "repair", "--yes", code=1)
    assert "no node to go to" in text
    assert not (PLACE / "b").exists()


def test_fragments_are_a_source_for_shards(capsys, nodes: Nodes) -> None:
    nodes.lose("a")
    save("plain", 5, ranks=[0])
    told(capsys, "repair", "plain", "--from", "ckpts", "--yes")
    assert ask(capsys, "ls", "plain")[0]["state"] == "whole"


def test_prune_removes_fragments(capsys, nodes: Nodes) -> None:
    for rank in range(WORLD):
        nodes.parity("abcde"[rank], "2+2").put(*shard(6, rank, WORLD))
    told(capsys, "prune", "--last", "1", "--yes")
    assert [row["step"] for row in ask(capsys, "ls")] == [6]
    assert not list(PLACE.rglob(f"{name(5)}*"))
