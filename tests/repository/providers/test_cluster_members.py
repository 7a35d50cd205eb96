"""Providers that join, leave and are lost: what moves, and what stays readable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sapwood.errors import ConfigError, ModelExists, ModelNotFound, StoreError, Unreachable
from sapwood.repository.providers.base import Member, Members
from sapwood.repository.providers.cluster import ClusterBackend
from sapwood.repository.providers.cluster_places import HEAD
from sapwood.repository.providers.placement import places
from sapwood.store import Repository
from tests.repository.providers.clusters import Cluster


def quiet(_: str) -> None:
    pass


def weights(seed: int, count: int = 40) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"w{n}": torch.randn(50 + n) for n in range(count)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def misplaced(cluster: Cluster, members: Members) -> list[str]:
    """What is not at its places, or beside them."""
    found = []
    parts, heads = cluster.parts(), cluster.heads()
    for name, key in set().union(*parts.values()):
        wanted = {m.name for m in places(members, key, name.partition("@")[0])}
        at = {node for node, some in parts.items() if (name, key) in some}
        found += [f"{name} {key.hex()}: {at}, not {wanted}"] if at != wanted else []
    for reference in set().union(*heads.values()):
        wanted = {m.name for m in places(members, HEAD, reference.partition("@")[0])}
        at = {node for node, some in heads.items() if reference in some}
        found += [f"{reference}: {at}, not {wanted}"] if at != wanted else []
    return found


@pytest.fixture(params=[(2, 1, "content"), (2, 2, "content"), (3, 2, "model")])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    count, replicas, placement = request.param
    made = Cluster(count, replicas=replicas, placement=placement)
    yield made
    made.close()


@pytest.fixture
def backend(cluster: Cluster) -> Iterator[ClusterBackend]:
    made = cluster.backend()
    yield made
    made.close()


def filled(cluster: Cluster, backend: ClusterBackend, count: int = 12) -> Repository:
    repo = Repository(backend, durability=cluster.durability)
    for number in range(count):
        repo.save(weights(number), f"m{number}@1", tags=["best"], metrics={"loss": number})
    return repo


def test_everything_is_at_its_places(cluster: Cluster, backend: ClusterBackend) -> None:
    repo = filled(cluster, backend)
    assert misplaced(cluster, cluster.members) == []
    assert repo.verify().problems == []
    assert len({name for name, some in cluster.parts().items() if some}) == len(cluster.nodes)


def test_a_provider_that_joins_takes_its_share_and_no_more() -> None:
    cluster = Cluster(3)
    backend = cluster.backend()
    repo = filled(cluster, backend)
    records = {str(record.reference): record for record in repo.models()}
    sent_before = {name: node.sent for name, node in cluster.nodes.items()}
    total = sum(record.nbytes for record in records.values())
    node = cluster.add(3)
    moved = backend.membership.join(node.member, said=quiet)
    assert misplaced(cluster, backend.members) == []
    assert {name: n.sent for name, n in cluster.nodes.items() if name != "p3"} == sent_before
    assert moved.nbytes == node.sent
    assert 0.15 < node.sent / total < 0.35  # a quarter of everything is its share
    assert moved.problems == []
    assert {str(record.reference): record for record in repo.models()} == records
    assert all(same(repo.load(f"m{n}@best"), weights(n)) for n in range(12))
    assert repo.verify().problems == []
    backend.close()
    cluster.close()


def test_a_provider_that_leaves_is_empty_and_nothing_is_missing(
    cluster: Cluster, backend: ClusterBackend
) -> None:
    repo = filled(cluster, backend)
    records = {str(record.reference): record for record in repo.models()}
    node = cluster.add(9)
    backend.membership.join(node.member, said=quiet)
    moved = backend.membership.leave("p0", lost=False, said=quiet)
    assert moved.problems == []
    assert not cluster.parts()["p0"]
    assert not cluster.heads()["p0"]
    cluster.nodes["p0"].dead = True
    assert misplaced(cluster, backend.members) == []
    assert {str(record.reference): record for record in repo.models()} == records
    assert all(same(repo.load(f"m{n}"), weights(n)) for n in range(12))
    assert repo.verify().problems == []


def test_what_has_left_can_come_back(cluster: Cluster, backend: ClusterBackend) -> None:
    repo = filled(cluster, backend, 4)
    node = cluster.add(9)
    for _ in range(2):
        backend.membership.join(node.member, said=quiet)
        backend.membership.leave("p9", lost=False, said=quiet)
    assert misplaced(cluster, backend.members) == []
    assert all(same(repo.load(f"m{n}"), weights(n)) for n in range(4))


def test_clients_with_an_older_list_are_corrected(cluster: Cluster) -> None:
    backend, other = cluster.backend(), cluster.backend()
    repo = filled(cluster, backend, 4)
    late = Repository(other, durability=cluster.durability)
    opened = late.open("m1@1")
    backend.membership.join(cluster.add(9).member, said=quiet)
    assert torch.equal(opened["w0"].load(), weights(1)["w0"])
    late.save(weights(7), "late@1", parent="m1@1")
    assert other.members == backend.members
    assert same(repo.load("late"), weights(7))
    assert misplaced(cluster, backend.members) == []
    backend.close()
    other.close()


def test_while_data_moves_it_is_read_where_it_was(cluster: Cluster) -> None:
    backend, other = cluster.backend(), cluster.backend()
    repo, late = filled(cluster, backend, 8), Repository(other, durability=cluster.durability)
    node = cluster.add(9)
    seen: list[bool] = []

    def look(name: str) -> None:
        if name != "put_part" or len(seen) > 3:
            return
        node.before = None
        seen.append(all(same(late.load(f"m{n}@1"), weights(n)) for n in range(8)))
        with pytest.raises(ModelExists):
            late.save(weights(0), "m3@1")
        saved = late.save(weights(50 + len(seen)), "m4", tags=["best"])
        assert saved.version == str(len(seen) + 1)
        assert len(late.models("m3")) == 1
        node.before = look

    node.before = look
    backend.membership.join(node.member, said=quiet)
    assert seen
    assert all(seen)
    node.before = None
    count = len(seen)
    assert repo.info("m4").version == repo.info("m4@best").version == str(count + 1)
    assert misplaced(cluster, backend.members) == []
    assert repo.verify().problems == []
    backend.close()
    other.close()


def test_a_join_that_was_cut_off_is_ended_by_repair(cluster: Cluster) -> None:
    backend = cluster.backend()
    repo = filled(cluster, backend, 8)
    node = cluster.add(9)
    calls = 0

    def die(name: str) -> None:
        nonlocal calls
        calls += name == "put_part"
        node.dead = calls > 1

    node.before = die
    with pytest.raises(Unreachable, match="p9"):
        backend.membership.join(node.member, said=quiet)
    node.before, node.dead = None, False
    fresh = cluster.backend()
    again = Repository(fresh, durability=cluster.durability)
    assert all(same(again.load(f"m{n}"), weights(n)) for n in range(8))
    assert any("on the way" in problem for problem in again.verify().problems)
    with pytest.raises(StoreError, match="repair"):
        fresh.membership.leave("p0", lost=False, said=quiet)
    fresh.membership.repair(said=quiet)
    assert misplaced(cluster, fresh.members) == []
    assert again.verify().problems == []
    assert all(same(repo.load(f"m{n}"), weights(n)) for n in range(8))
    backend.close()
    fresh.close()


def test_after_a_provider_was_lost_all_copies_are_made_again() -> None:
    cluster = Cluster(3, replicas=2)
    backend = cluster.backend()
    repo = filled(cluster, backend)
    cluster.nodes["p1"].dead = True
    assert all(same(repo.load(f"m{n}"), weights(n)) for n in range(12))
    with pytest.raises(Unreachable, match="p1"):
        backend.membership.leave("p1", lost=False, said=quiet)
    moved = backend.membership.leave("p1", lost=True, said=quiet)
    assert moved.problems == []
    del cluster.nodes["p1"]
    assert misplaced(cluster, backend.members) == []
    assert repo.verify().problems == []
    assert all(same(repo.load(f"m{n}"), weights(n)) for n in range(12))
    backend.close()
    cluster.close()


def test_what_is_lost_with_the_only_copy_is_said() -> None:
    cluster = Cluster(2)
    backend = cluster.backend()
    filled(cluster, backend)
    cluster.nodes["p1"].dead = True
    moved = backend.membership.leave("p1", lost=True, said=quiet)
    assert any("no sound copy" in problem for problem in moved.problems)
    assert any("lost" in problem for problem in moved.problems)
    backend.close()
    cluster.close()


def test_a_provider_that_was_away_gets_what_it_missed() -> None:
    cluster = Cluster(3, replicas=2)
    backend = cluster.backend()
    repo = filled(cluster, backend, 4)
    cluster.nodes["p2"].dead = True
    for number in range(4, 10):
        repo.save(weights(number), f"m{number}@1", tags=["best"])
    repo.save(weights(20), "m1@2", tags=["best"])
    cluster.nodes["p2"].dead = False
    backend.links.link(cluster.nodes["p2"].member).forgive()
    # Also before that nobody is told something old.
    assert repo.info("m1").version == repo.info("m1@best").version == "2"
    assert [r.version for r in repo.models("m1") if "best" in r.tags] == ["2"]
    assert repo.verify().problems
    assert backend.membership.repair(said=quiet).problems == []
    assert misplaced(cluster, backend.members) == []
    assert repo.verify().problems == []
    assert cluster.nodes["p2"].provider.members() == backend.members
    backend.close()
    cluster.close()


def test_a_removal_that_one_home_missed_is_made_good() -> None:
    cluster = Cluster(2, replicas=2)
    backend = cluster.backend()
    repo = filled(cluster, backend, 2)
    cluster.nodes["p0"].dead = True
    with pytest.raises(Unreachable, match="p0"):
        repo.remove("m0@1")
    cluster.nodes["p0"].dead = False
    backend.links.link(cluster.nodes["p0"].member).forgive()
    assert same(repo.load("m0"), weights(0))
    cluster.nodes["p1"].dead_for = {"remove_head"}
    with pytest.raises(Unreachable, match="p1"):
        repo.remove("m0@1")
    cluster.nodes["p1"].dead_for = set()
    backend.membership.repair(said=quiet)
    states = {m for node in cluster.heads().values() for m in node}
    assert states in ({"m1@1"}, {"m0@1", "m1@1"})
    if states == {"m1@1"}:
        with pytest.raises(ModelNotFound):
            repo.load("m0@1")
    assert repo.verify().problems == []
    backend.close()
    cluster.close()


@pytest.mark.parametrize("name", ["", "../p", "p 1", "p\n", "x" * 80, "ü"])
def test_names_of_providers_are_checked(name: str) -> None:
    cluster = Cluster(1)
    backend = cluster.backend()
    with pytest.raises(ConfigError, match="name of a provider"):
        backend.membership.join(Member(name, "here:1"), said=quiet)
    assert backend.members.epoch == 1
    backend.close()
    cluster.close()


def test_a_place_with_versions_of_its_own_is_not_taken_in() -> None:
    cluster, stranger = Cluster(1), Cluster(1)
    with stranger.repository() as repo:
        repo.save(weights(0), "theirs@1")
    backend = cluster.backend()
    node = cluster.add(5)
    node.provider.close()
    node.provider = stranger.nodes["p0"].provider
    with pytest.raises(ConfigError, match="calls itself 'p0'"):
        backend.membership.join(node.member, said=quiet)
    with pytest.raises(ConfigError, match="there would be 0 providers"):
        backend.membership.leave("p0", lost=False, said=quiet)
    with pytest.raises(ConfigError, match="no provider 'p7'"):
        backend.membership.leave("p7", lost=False, said=quiet)
    backend.close()
    cluster.close()


def test_of_two_changes_at_once_one_fails() -> None:
    cluster = Cluster(2)
    one, other = cluster.backend(), cluster.backend()
    first, second = cluster.add(7), cluster.add(8)

    def interfere(name: str) -> None:
        if name == "take_members":
            cluster.nodes["p0"].before = None
            other.membership.join(second.member, said=quiet)

    cluster.nodes["p0"].before = interfere
    with pytest.raises(StoreError, match=r"another change|list of providers"):
        one.membership.join(first.member, said=quiet)
    lists = {node.provider.members() for name, node in cluster.nodes.items() if name != "p7"}
    assert lists == {other.members}
    one.close()
    other.close()
    cluster.close()
