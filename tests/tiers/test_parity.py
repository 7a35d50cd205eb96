"""Fragments on several nodes: which losses are survived, and what is said about those that are not.

Nodes are folders with a peer server each; ranks and nodes have the same numbers, so rank 0 is on
node a. Servers are processes of their own where one is killed or stopped.
"""

from __future__ import annotations

import shutil
import time
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.state.catalog import Catalog
from sapwood.state.shards import plan_shards
from sapwood.tiers.base import Stored
from sapwood.tiers.codec import PART_BYTES
from sapwood.tiers.digest import digest
from sapwood.tiers.fragments import Fragment
from sapwood.tiers.keeper import Blob
from sapwood.tiers.parity import ParityTier
from sapwood.tiers.record import CheckpointId, ShardRecord, describe
from sapwood.tiers.spec import NodeMap
from tests.tiers import contract
from tests.tiers.nodes import TOKEN, Cluster, cluster
from tests.tiers.shards import ATTEMPT, shard

ID = CheckpointId(7, ATTEMPT)
SHARD = Stored(ID, 0)
SCHEMES = ("1+1", "2+1", "2+2", "4+2")
LARGE = 150_000  # of some 1.2 MB: several blocks of 256 KiB


def total(scheme: str) -> int:
    k, m = scheme.split("+")
    return int(k) + int(m)


def losses(scheme: str, extra: int = 0) -> list[tuple[str, ...]]:
    """Sets of lost nodes, as many as may be lost and ``extra`` more."""
    m = int(scheme.split("+")[1]) + extra
    sizes = range(1, m + 1) if not extra else [m]
    return [lost for n in sizes for lost in combinations("abcdefgh"[: total(scheme)], n)]


def saved(nodes: Cluster, scheme: str) -> np.ndarray:
    record, memory = shard(7, 0, 1, large=LARGE)
    nodes.parity("a", scheme, block=4 * PART_BYTES).put(record, memory)
    return memory


def files(nodes: Cluster, name: str, suffix: str = ".bin") -> Path:
    (path,) = nodes.folder(name).glob(f"parity/*/*{suffix}")
    return path


def check(nodes: Cluster, scheme: str, reader: str, memory: np.ndarray) -> None:
    tier = nodes.parity(reader, scheme, timeout=0.5)
    assert list(tier.shards()) == [SHARD]
    assert np.array_equal(contract.read_all(tier, SHARD), memory)
    tier.close()


def refused(nodes: Cluster, scheme: str, reader: str, match: str = "are needed|not found") -> str:
    tier = nodes.parity(reader, scheme, timeout=0.5)
    with pytest.raises(CheckpointError, match=match) as caught:
        contract.read_all(tier, SHARD)
    tier.close()
    return str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_contract(tmp_path: Path, scheme: str) -> None:
    with cluster(tmp_path, total(scheme)) as nodes:
        contract.keeps_shards(nodes.parity("b", scheme))
        assert list(nodes.parity("a", scheme).shards()) == list(nodes.parity("b", scheme).shards())


# -- the recovery matrix ---------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_m_wiped_nodes_are_survived_and_one_more_is_not(tmp_path: Path, scheme: str) -> None:
    with cluster(tmp_path / "live", total(scheme)) as nodes:
        memory = saved(nodes, scheme)
        shutil.copytree(tmp_path / "live", tmp_path / "kept")
        for lost in losses(scheme) + losses(scheme, extra=1):
            for name in nodes.names:
                nodes.wipe(name)
                if name not in lost:
                    shutil.copytree(tmp_path / "kept" / name, nodes.folder(name))
            reader = nodes.names[len(lost) % len(nodes.names)]
            if len(lost) <= int(scheme.split("+")[1]):
                check(nodes, scheme, reader, memory)
            elif len(lost) < total(scheme):
                message = refused(nodes, scheme, reader)
                for name in lost:
                    assert str(nodes.names.index(name)) in message
                assert list(nodes.parity(reader, scheme).shards()) == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_damaged_fragments_are_lost_fragments(tmp_path: Path, scheme: str) -> None:
    m = int(scheme.split("+")[1])
    with cluster(tmp_path, total(scheme)) as nodes:
        memory = saved(nodes, scheme)
        reader = nodes.names[-1]
        for suffix, damage in product((".bin", ".json"), (flip, cut, Path.unlink)):
            # The data fragments, which are read first; then one more than may be lost.
            chosen = [files(nodes, name, suffix) for name in nodes.names[: m + 1]]
            whole = [path.read_bytes() for path in chosen]
            for path in chosen[:m]:
                damage(path)
            check(nodes, scheme, reader, memory)
            damage(chosen[m])
            refused(nodes, scheme, reader)
            for path, content in zip(chosen, whole, strict=True):
                path.write_bytes(content)
        check(nodes, scheme, reader, memory)


def test_different_fragments_may_be_damaged_in_different_blocks(tmp_path: Path) -> None:
    with cluster(tmp_path, 6) as nodes:
        memory = saved(nodes, "4+2")
        for number, name in enumerate(nodes.names[:4]):
            content = bytearray(files(nodes, name).read_bytes())
            content[number * PART_BYTES + number * 80 + 1000] ^= 1  # in block ``number``
            files(nodes, name).write_bytes(content)
        check(nodes, "4+2", "f", memory)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(("scheme", "lost"), [("2+1", "b"), ("2+2", "bd"), ("4+2", "be")])
def test_gone_processes_are_survived(tmp_path: Path, scheme: str, lost: str, how: str) -> None:
    extra = next(name for name in "abcdef" if name not in lost)
    with cluster(tmp_path, total(scheme), processes=(*lost, extra)) as nodes:
        memory = saved(nodes, scheme)
        for name in lost:
            getattr(nodes.servers[name], how)()
        reader = nodes.names[-1] if nodes.names[-1] not in lost else nodes.names[-2]
        begin = time.monotonic()
        check(nodes, scheme, reader, memory)
        getattr(nodes.servers[extra], how)()
        message = refused(nodes, scheme, reader)
        assert time.monotonic() - begin < 20  # timeouts of 0.5 s, and none of them per block
        for name in (*lost, extra):
            assert f"node {name} " in message


def test_a_stopped_node_is_waited_for_once_and_not_for_every_shard(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, processes=("c",)) as nodes:
        writer = nodes.parity("a", "2+1")
        for rank in range(8):
            writer.put(*shard(7, rank, 8, large=100))
        nodes.servers["c"].stop()
        tier = nodes.parity("b", "2+1", timeout=1.0)
        begin = time.monotonic()
        for stored in tier.shards():
            contract.read_all(tier, stored)
        assert time.monotonic() - begin < 6  # and not 8 times 1 s or more


def test_a_process_that_is_lost_while_a_shard_is_read(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, processes=("a", "b")) as nodes:
        memory = saved(nodes, "2+1")
        tier = nodes.parity("c", "2+1", timeout=0.5)
        found = tier.open(SHARD)
        first, *_, last = found.record.ranges
        out = np.zeros(first.nbytes, np.uint8)
        nodes.servers["b"].kill()
        found.read_into(first, out)
        assert np.array_equal(out, memory[first.at : first.at + first.nbytes])
        nodes.servers["a"].kill()
        with pytest.raises(CheckpointError, match="2 are needed"):
            found.read_into(last, np.zeros(last.nbytes, np.uint8))
        found.close()


# -- putting ---------------------------------------------------------------------------------


def test_a_put_that_a_node_did_not_take_fails_and_can_be_repeated(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, processes=("b",)) as nodes:
        record, memory = shard(7, 0, 1)
        nodes.servers["b"].kill()
        with pytest.raises(TierError, match="node b"):
            nodes.parity("a", "2+1").put(record, memory)
        assert list(nodes.parity("a", "2+1").shards()) == []
        nodes.start("b")
        nodes.parity("a", "2+1").put(record, memory)
        assert np.array_equal(contract.read_all(nodes.parity("c", "2+1"), SHARD), memory)


def test_a_shard_without_bytes(tmp_path: Path) -> None:
    """More ranks than tensors: some have nothing to save."""
    plan = plan_shards(Catalog(()), 1)
    record = describe(
        id=ID,
        world=1,
        catalog=plan.catalog,
        shard=plan.shards[0],
        data=np.zeros(0, np.uint8),
        created=1.0,
        extras={},
    )
    assert record.nbytes == 0
    with cluster(tmp_path, 3) as nodes:
        for tier in (nodes.parity("a", "2+1"), nodes.partner("a")):
            tier.put(record, np.zeros(0, np.uint8))
            assert list(tier.shards()) == [SHARD]
            assert len(contract.read_all(tier, SHARD)) == 0


def test_every_node_puts_and_every_node_reads(tmp_path: Path) -> None:
    with cluster(tmp_path, 4) as nodes:
        memories = {}
        for rank, name in enumerate(nodes.names):
            record, memories[rank] = shard(7, rank, 4, large=1000)
            tier = nodes.parity(name, "2+1")
            assert tier.holders == [nodes.names[(rank + n) % 4] for n in range(3)]
            tier.put(record, memories[rank])
        nodes.wipe("c")
        tier = nodes.parity("c", "2+1")  # a new node in its place
        assert list(tier.shards()) == [Stored(ID, rank) for rank in range(4)]
        for rank, memory in memories.items():
            assert np.array_equal(contract.read_all(tier, Stored(ID, rank)), memory)


def test_another_scheme_reads_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    with cluster(tmp_path, 4) as nodes:
        memory = saved(nodes, "2+2")
        assert np.array_equal(contract.read_all(nodes.parity("d", "2+1"), SHARD), memory)


def test_fragments_of_different_shards_are_never_mixed(tmp_path: Path) -> None:
    """Two records under one id, as no run makes them: either comes back, or nothing."""
    with cluster(tmp_path, 4) as nodes:
        one, two = shard(7, 0, 1, large=1000), shard(7, 0, 1, large=2000)
        nodes.parity("a", "2+2").put(*one)
        nodes.wipe("a")
        nodes.parity("a", "2+2").put(*two)
        tier = nodes.parity("b", "2+2")
        assert np.array_equal(contract.read_all(tier, SHARD), two[1])
        for name in "bc":
            for path in nodes.folder(name).glob(f"parity/*/*{digest_of(two)}*"):
                path.unlink()
        nodes.wipe("a")
        assert np.array_equal(contract.read_all(tier, SHARD), one[1])


def digest_of(pair: tuple[ShardRecord, np.ndarray]) -> str:
    return digest(pair[0].encode())


def test_names_of_fragments() -> None:
    for text in ("shard-0", "shard-0.2+1.0.xyz", "shard-0.0+1.0." + "0" * 16, "x" * 40):
        assert Fragment.parse(Blob("parity", ID.folder, text)) is None
    assert Fragment.parse(Blob("parity", "notes", "shard-0.2+1.0." + "0" * 16)) is None


# -- settings --------------------------------------------------------------------------------


def test_too_few_nodes_are_refused(tmp_path: Path) -> None:
    nodes = NodeMap(node="a", rank_nodes=("a", "a", "b", "c"), token=TOKEN)
    with pytest.raises(ConfigError, match=r"4\+2 needs 6 nodes.*there are 3: a, b, c"):
        ParityTier("4+2", nodes, tmp_path)


def test_unknown_addresses_are_refused(tmp_path: Path) -> None:
    nodes = NodeMap(
        node="a", rank_nodes=("a", "b", "c"), addresses={"b": "127.0.0.1:1"}, token=TOKEN
    )
    with pytest.raises(ConfigError, match="servers of c listen"):
        ParityTier("2+1", nodes, tmp_path)


# -- mending ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lost_fragments_are_written_anew_so_that_others_may_be_lost(
    tmp_path: Path, scheme: str
) -> None:
    m = int(scheme.split("+")[1])
    with cluster(tmp_path, total(scheme) + 1) as nodes:
        memory = saved(nodes, scheme)
        whole = {name: sorted(blobs(nodes, name)) for name in nodes.names}
        for first in range(0, total(scheme) - m + 1, m):  # again and again, other nodes each time
            for name in nodes.names[first : first + m]:
                nodes.wipe(name)
            for name in nodes.names:
                nodes.parity(name, scheme).mend(ID)
            assert {name: sorted(blobs(nodes, name)) for name in nodes.names} == whole
            check(nodes, scheme, nodes.names[first], memory)


def blobs(nodes: Cluster, name: str) -> list[tuple[str, bytes]]:
    return [(p.name, p.read_bytes()) for p in nodes.folder(name).glob("parity/*/*")]


def test_a_node_mends_only_what_is_its_own(tmp_path: Path) -> None:
    with cluster(tmp_path, 4) as nodes:
        for rank, name in enumerate(nodes.names):
            nodes.parity(name, "2+1").put(*shard(7, rank, 4, large=100))
        assert [nodes.parity(name, "2+1").mend(ID) for name in nodes.names] == [0, 0, 0, 0]
        nodes.wipe("c")
        nodes.wipe("d")
        assert nodes.parity("a", "2+1").mend(ID) == 0
        # Of ranks 0 and 3 two fragments are left; of 1 and 2 too few.
        assert nodes.parity("c", "2+1").mend(ID) == 1
        assert nodes.parity("d", "2+1").mend(ID) == 1
        assert [s.rank for s in nodes.parity("b", "2+1").shards()] == [0, 3]


def test_mending_is_not_stopped_by_a_node_out_of_reach(tmp_path: Path) -> None:
    with cluster(tmp_path, 5, processes=("d",)) as nodes:
        memory = saved(nodes, "2+2")
        nodes.wipe("b")
        nodes.servers["d"].kill()
        tiers = {name: nodes.parity(name, "2+2", timeout=0.5) for name in "abce"}
        assert {name: tier.mend(ID) for name, tier in tiers.items()} == {
            "a": 0, "b": 1, "c": 0, "e": 0
        }  # fmt: skip
        nodes.wipe("a")
        check(nodes, "2+2", "e", memory)
