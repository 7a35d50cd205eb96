"""Copies on the next node: the contract, a node that is replaced, a partner that vanishes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.local import LocalTier
from sapwood.tiers.make import make_tiers, peer_folder
from sapwood.tiers.parity import ParityTier
from sapwood.tiers.partner import PartnerTier
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import NodeMap, TierSpec
from tests.tiers import contract
from tests.tiers.nodes import TOKEN, cluster
from tests.tiers.shards import ATTEMPT, shard

ID = CheckpointId(7, ATTEMPT)
LARGE = 300_000  # elements: some 2.4 MB, which are three blocks on the wire


def test_the_contract(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        contract.keeps_shards(nodes.partner("a"))
        assert not (tmp_path / "a").exists()  # all of it is on the other node


def test_every_single_node_may_be_replaced_by_an_empty_one(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        memories = {}
        for rank, name in enumerate(nodes.names):
            record, memories[rank] = shard(7, rank, 3, large=1000)
            nodes.partner(name).put(record, memories[rank])
        kept = {name: [s.rank for s in nodes.partner(name).shards()] for name in nodes.names}
        assert kept == {"a": [0, 2], "b": [0, 1], "c": [1, 2]}
        nodes.wipe("b")  # with what it kept for a
        kept = {name: [s.rank for s in nodes.partner(name).shards()] for name in nodes.names}
        assert kept == {"a": [2], "b": [1], "c": [1, 2]}
        for reader, rank in (("b", 1), ("c", 1), ("a", 2), ("c", 2)):
            found = contract.read_all(nodes.partner(reader), Stored(ID, rank))
            assert np.array_equal(found, memories[rank])


def test_both_sides_see_a_shard_after_all_servers_were_started_again(tmp_path: Path) -> None:
    record, memory = shard(7, 0, 2)
    with cluster(tmp_path, 2) as nodes:
        nodes.partner("a").put(record, memory)
    with cluster(tmp_path, 2) as nodes:
        for name in nodes.names:
            assert list(nodes.partner(name).shards()) == [Stored(ID, 0)]
            assert np.array_equal(contract.read_all(nodes.partner(name), Stored(ID, 0)), memory)


def test_what_is_kept_here_is_seen_though_the_partner_is_gone(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, processes=("a",)) as nodes:
        record, memory = shard(7, 0, 2)
        nodes.partner("a").put(record, memory)
        nodes.servers["a"].kill()
        tier = nodes.partner("b")
        assert list(tier.shards()) == [Stored(ID, 0)]
        assert np.array_equal(contract.read_all(tier, Stored(ID, 0)), memory)
        with pytest.raises(CheckpointError, match="neither kept here nor at node a"):
            tier.open(Stored(ID, 1))
        nodes.wipe("b")
        with pytest.raises(TierError, match=r"node a .* cannot be reached"):
            tier.shards()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_partner_that_vanishes_in_the_middle_of_a_put(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, 2) as nodes:
        nodes.start("b", process=True, SAPWOOD_FAULTS=f"peers.receive:{how}@2")
        record, memory = shard(7, 0, 2, large=LARGE)
        tier = nodes.partner("a", timeout=0.5)
        begin = time.monotonic()
        with pytest.raises(TierError, match=r"node b"):
            tier.put(record, memory)
        with pytest.raises(TierError):
            tier.put(record, memory)
        assert time.monotonic() - begin < 10
        nodes.start("b")
        tier = nodes.partner("a")
        assert list(tier.shards()) == []  # nothing half there
        tier.put(record, memory)
        assert np.array_equal(contract.read_all(tier, Stored(ID, 0)), memory)


def test_a_partner_whose_disk_fails_says_so_and_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        record, memory = shard(7, 0, 2, large=LARGE)
        (tmp_path / "b").write_text("in the way")
        tier = nodes.partner("a")
        with pytest.raises(TierError, match=r"node b .*cannot write"):
            tier.put(record, memory)
        (tmp_path / "b").unlink()
        tier.put(record, memory)
        assert np.array_equal(contract.read_all(tier, Stored(ID, 0)), memory)


@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_damage_is_found(tmp_path: Path, suffix: str) -> None:
    with cluster(tmp_path, 2) as nodes:
        nodes.partner("a").put(*shard(7, 0, 2))
        path = tmp_path / "b" / "partner" / ID.folder / f"shard-0.{suffix}"
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
            path.write_bytes(damaged)
            for reader in nodes.names:
                with pytest.raises(CheckpointError):
                    contract.read_all(nodes.partner(reader), Stored(ID, 0))


# -- settings --------------------------------------------------------------------------------


def test_a_single_node_has_no_partner(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only node"):
        PartnerTier(NodeMap(node="a", rank_nodes=("a", "a"), token=TOKEN), tmp_path)


def test_an_address_that_is_none(tmp_path: Path) -> None:
    nodes = NodeMap(node="a", rank_nodes=("a", "b"), addresses={"b": "nowhere"}, token=TOKEN)
    with pytest.raises(ConfigError, match="'nowhere', expected host:port"):
        PartnerTier(nodes, tmp_path)


def specs(*texts: str) -> list[TierSpec]:
    return [TierSpec.parse(text) for text in texts]


def test_where_a_node_keeps_what_others_give_it(tmp_path: Path) -> None:
    nodes = NodeMap(node="a", rank_nodes=("a", "b"))
    assert peer_folder(specs("memory", "local:/x"), nodes) is None
    assert peer_folder(specs("partner:/k"), nodes) == Path("/k/a/kept")
    assert peer_folder(specs("parity:1+1:/k"), nodes) == Path("/k/a/kept")
    assert peer_folder(specs("local:/x", "partner", "parity:1+1"), nodes) == Path("/x/a/kept")
    with pytest.raises(ConfigError, match=r"no folder is set.*partner:/"):
        peer_folder(specs("partner"), nodes)
    with pytest.raises(ConfigError, match="share one folder"):
        peer_folder(specs("partner:/k", "parity:1+1:/l"), nodes)
    with pytest.raises(ConfigError, match="timeout=0"):
        TierSpec(kind="partner", timeout=0)


def test_tiers_from_settings_work_together(tmp_path: Path) -> None:
    wanted = specs(f"local:{tmp_path}/x", f"partner:{tmp_path}", "parity:2+1")
    with cluster(tmp_path, 3) as nodes:
        record, memory = shard(7, 0, 1, large=1000)
        local, partner, parity = make_tiers(wanted, nodes.nodes("a"))
        assert isinstance(partner, PartnerTier)
        assert isinstance(parity, ParityTier)
        for tier in (local, partner, parity):
            tier.put(record, memory)
            assert list(tier.shards()) == [Stored(ID, 0)]
            assert np.array_equal(contract.read_all(tier, Stored(ID, 0)), memory)
        local.drop(ID)
        partner.drop(ID)
        assert list(partner.shards()) == []
        assert list(parity.shards()) == [Stored(ID, 0)]
        for tier in (local, partner, parity):
            tier.close()


def test_a_partner_that_came_back_empty_is_given_its_copies_again(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        record, memory = shard(7, 0, 3)
        local = LocalTier(tmp_path / "local-a")
        local.put(record, memory)
        nodes.partner("a").put(record, memory)
        assert nodes.partner("a").mend(record.id, [local]) == 0
        nodes.wipe("b")
        assert nodes.partner("c").mend(record.id, [local]) == 0  # not a rank of that node
        assert nodes.partner("a").mend(record.id, [local]) == 1
        stored = Stored(record.id, 0)
        assert np.array_equal(contract.read_all(nodes.partner("b"), stored), memory)


def test_a_shard_of_another_step_is_not_taken_for_what_the_partner_lost(tmp_path: Path) -> None:
    local, sound = LocalTier(tmp_path / "local"), LocalTier(tmp_path / "sound", name="external")
    record, memory = shard(7, 0, 2)
    sound.put(record, memory)
    local.put(*shard(5, 0, 2))
    (local.folder / CheckpointId(5, ATTEMPT).folder).rename(local.folder / ID.folder)
    with cluster(tmp_path, 2) as nodes:
        assert nodes.partner("a").mend(ID, [local]) == 0
        assert nodes.partner("a").mend(ID, [local, sound]) == 1
        assert list(nodes.partner("a").shards()) == [Stored(ID, 0)]
