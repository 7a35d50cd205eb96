"""A repository on several providers: races, silent providers, lost answers, and what is shared."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sapwood.errors import (
    ConfigError,
    Damaged,
    Gone,
    ModelExists,
    ModelNotFound,
    NoRoom,
    StoreError,
    Unreachable,
)
from sapwood.repository.base import BlobPart
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import VersionKey
from sapwood.repository.providers.cluster import ClusterBackend
from sapwood.repository.providers.cluster_handles import with_handles
from sapwood.repository.providers.cluster_places import HEAD
from sapwood.repository.providers.placement import key_of, order, places
from sapwood.store import Repository
from tests.repository.providers.clusters import Cluster


def quiet(_: str) -> None:
    pass


def weights(seed: int, count: int = 12) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"w{n}": torch.randn(100 + n) for n in range(count)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """Two providers, one copy of everything."""
    cluster = Cluster(2)
    yield cluster
    cluster.close()


@pytest.fixture
def twins() -> Iterator[Cluster]:
    """Two providers, two copies of everything."""
    cluster = Cluster(2, replicas=2)
    yield cluster
    cluster.close()


def nothing_left(cluster: Cluster) -> bool:
    return not any(cluster.heads().values()) and not any(cluster.parts().values())


# -- two at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_of_several_who_save_a_version_exactly_one_does(replicas: int) -> None:
    cluster = Cluster(3, replicas=replicas)
    backends = [cluster.backend() for _ in range(4)]
    repos = [Repository(backend, durability=cluster.durability) for backend in backends]
    won: list[tuple[int, int]] = []
    failures: list[BaseException] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        for turn in range(6):
            gate.wait(30)
            try:
                repos[number].save({"w": torch.full((100,), number)}, f"m@{turn}")
                won.append((turn, number))
            except ModelExists:
                pass
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(turn for turn, _ in won) == list(range(6))
    for turn, number in won:
        assert repos[0].load(f"m@{turn}")["w"][0] == number
    assert repos[0].verify().problems == []
    for repo in repos:
        repo.close()
    cluster.close()


def test_numbers_are_given_once_by_several_clients(twins: Cluster) -> None:
    versions: list[str] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with twins.repository() as repo:
                versions.extend(repo.save(weights(0, 2), "m").version for _ in range(5))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(map(int, versions)) == list(range(1, 16))


def test_two_who_reach_different_homes_first_do_not_both_win(twins: Cluster) -> None:
    first, second = (twins.nodes[m.name] for m in places(twins.members, HEAD, "m"))
    with twins.repository() as one, twins.repository() as other:

        def interfere(name: str) -> None:
            if name == "put_head":
                first.before = None
                second.provider.heads.give_up(None)  # as if the reservation had ended
                first.dead = True
                other.save(weights(2), "m@1")
                first.dead = False

        first.before = interfere
        with pytest.raises(ModelExists):
            one.save(weights(1), "m@1")
        assert same(one.load("m"), weights(2))
        assert twins.heads()[first.member.name] == set()
        one._backend.membership.repair(said=quiet)
        assert same(other.load("m@1"), weights(2))
        assert one.verify().problems == []


# -- providers that do not answer --------------------------------------------------------------


def test_with_one_copy_a_silent_provider_is_named(pair: Cluster) -> None:
    with pair.repository() as repo:
        repo.save(weights(0, 40), "m@1")
        pair.nodes["p1"].dead = True
        with pytest.raises(Unreachable, match="provider p1 at here:1"):
            repo.load("m@1")
        with pytest.raises(Unreachable, match="provider p1 at here:1"):
            repo.save(weights(1, 40), "other@1")
        with pytest.raises(Unreachable, match="provider p1 at here:1"):
            repo.models()
        with pytest.raises(Unreachable, match="provider p1 at here:1"):
            repo._backend.kin([b"x" * 8], "*", 1, None, False)
        pair.nodes["p1"].dead = False
        assert same(repo.load("m@1"), weights(0, 40))
        repo.save(weights(1, 40), "other@1")
        assert repo.verify().problems == []


def test_with_two_copies_a_silent_provider_is_survived(twins: Cluster) -> None:
    with twins.repository() as repo:
        repo.save(weights(0), "m@1", metrics={"loss": 1})
        for name in ("p0", "p1"):
            twins.nodes[name].dead = True
            assert same(repo.load("m@1"), weights(0))
            assert same(dict(repo.open("m").value()), weights(0))
            repo.save(weights(3), f"beside-{name}@1", parent="m@1", tags=["best"])
            assert len(repo.children("m@1")) >= 1
            assert repo.info(f"beside-{name}@best").version == "1"
            assert [r.name for r in repo.log(f"beside-{name}")][-1] == "m"
            with pytest.raises(ModelNotFound):
                repo.load("m@2")
            with pytest.raises(Unreachable, match=name):
                repo.save(weights(4), "all@1", durability="replicated")
            with pytest.raises(Unreachable, match=name):
                repo.tag("m@1", "best")
            twins.nodes[name].dead = False
            for node in twins.nodes.values():
                repo._backend.links.link(node.member).forgive()
        with pytest.raises(ModelNotFound):
            repo.info("all@1")
        assert any("no copy at" in problem for problem in repo.verify().problems)
        repo._backend.membership.repair(said=quiet)
        assert repo.verify().problems == []
        repo.save(weights(4), "all@1", durability="replicated")


def test_replicated_is_refused_where_there_is_one_copy(pair: Cluster) -> None:
    with pair.repository() as repo, pytest.raises(ConfigError, match="one copy"):
        repo.save(weights(0), "m@1", durability="replicated")


def test_two_that_come_back_are_asked_again(twins: Cluster) -> None:
    with twins.repository() as repo:
        repo.save(weights(0), "m@1")
        for node in twins.nodes.values():
            node.dead = True
        with pytest.raises(Unreachable):
            repo.load("m@1")
        for node in twins.nodes.values():
            node.dead = False
        assert same(repo.load("m@1"), weights(0))


@pytest.mark.parametrize("call", ["put_part", "put_head", "reserve"])
def test_a_save_that_fails_leaves_nothing(pair: Cluster, call: str) -> None:
    with pair.repository() as repo:
        home = places(pair.members, HEAD, "m")[0].name
        pair.nodes[home].dead_for = {call}
        with pytest.raises(Unreachable, match=home):
            repo.save(weights(0), "m@1")
        pair.nodes[home].dead_for = set()
        with pytest.raises(ModelNotFound):
            repo.load("m@1")
        repo.gc(quiet=0)
        assert nothing_left(pair)
        repo.save(weights(0), "m@1")
        assert same(repo.load("m@1"), weights(0))
        assert repo.verify().problems == []


def test_a_head_whose_answer_was_lost_keeps_its_tensors(pair: Cluster) -> None:
    with pair.repository() as repo:
        home = pair.nodes[places(pair.members, HEAD, "m")[0].name]
        home.lost_answers = {"put_head"}
        with pytest.raises(Unreachable, match="may be saved or not"):
            repo.save(weights(0), "m@1")
        home.lost_answers = set()
        repo.gc(quiet=0)
        # It was there, or was taken back; in neither case is half of it there.
        if str(repo.models() and repo.models()[0].reference) == "m@1":
            assert same(repo.load("m@1"), weights(0))
        assert repo.verify().problems == []


def test_an_answer_that_was_lost_once_does_no_harm(pair: Cluster) -> None:
    with pair.repository() as repo:
        home = pair.nodes[places(pair.members, HEAD, "m")[0].name]
        home.lost_answers = {"put_head"}

        def once(name: str) -> None:
            if home.calls["put_head"] == 2:
                home.lost_answers = set()

        home.before = once
        repo.save(weights(0), "m@1")
        assert same(repo.load("m@1"), weights(0))


def test_a_full_provider_is_an_error_and_leaves_nothing(twins: Cluster) -> None:
    with twins.repository() as repo:
        keeper = twins.nodes["p1"].provider.parts_here.backend.keeper

        def full(*_: object, **__: object) -> None:
            raise NoRoom("no room")

        keeper.begin = full  # type: ignore[method-assign, assignment]
        with pytest.raises(NoRoom):
            repo.save(weights(0), "m@1")
        del keeper.begin
        assert nothing_left(twins)
        repo.save(weights(0), "m@1")


def test_a_provider_that_hangs_is_left_behind_by_the_deadline(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.repository.providers.cluster_asking._SECONDS", 0.3)
    go_on = threading.Event()
    with pair.repository() as repo:
        repo.save(weights(0), "m@1")
        pair.nodes["p1"].before = lambda name: name == "models" and go_on.wait(60)
        with pytest.raises(Unreachable, match=r"p1 .*0\.3 s"):
            repo.models()
        go_on.set()
    with twins_that_hang() as (repo, wake):
        assert len(repo.models()) == 1
        wake.set()


@contextmanager
def twins_that_hang() -> Iterator[tuple[Repository, threading.Event]]:
    cluster, wake = Cluster(2, replicas=2), threading.Event()
    with cluster.repository() as repo:
        repo.save(weights(0), "m@1")
        cluster.nodes["p1"].before = lambda name: name == "models" and wake.wait(60)
        yield repo, wake
    cluster.close()


# -- reading -----------------------------------------------------------------------------------


def test_a_damaged_copy_is_passed_over(tmp_path: Path) -> None:
    cluster = Cluster(2, replicas=2, root=tmp_path)
    with cluster.repository() as repo:
        repo.save(weights(0), "m@1")
        packs = [p for p in (tmp_path / "p0" / "parts").rglob("*") if "packs" in p.parts]
        for pack in packs:
            if pack.is_file():
                pack.unlink()
        assert same(dict(repo.open("m").value()), weights(0))
        assert same(repo.load("m"), weights(0))
        assert any(problem.startswith("p0: ") for problem in repo.verify().problems)
    cluster.close()


def test_what_no_provider_has_is_named(pair: Cluster) -> None:
    with pair.repository() as repo:
        record = repo.save(weights(0), "m@1")
        version = VersionKey(record.name, record.version, record.id)
        for node in pair.nodes.values():
            node.provider.drop_part(version)
        with pytest.raises(Damaged, match="m@1: no provider has"):
            repo.open("m")["w0"].load()
        assert len(repo.verify().problems) == 12


def test_who_has_a_version_open_is_told_that_it_was_removed(pair: Cluster) -> None:
    with pair.repository() as repo:
        repo.save(weights(0), "m@1")
        opened = repo.open("m@1")
        repo.remove("m@1")
        assert nothing_left(pair)
        with pytest.raises(Gone, match="m@1 was removed"):
            opened["w3"].load()
        with pytest.raises(ModelNotFound):
            repo.load("m")


def test_only_handles_are_taken_for_tensors(pair: Cluster) -> None:
    backend = pair.backend()
    with pytest.raises(Gone, match="belongs to no manifest"):
        backend.read([BlobPart(7, 0, memoryview(bytearray(4)))])
    repo = Repository(backend, durability=pair.durability)
    repo.save({"w": torch.arange(10)}, "m@1")
    _, manifest = backend.manifest(Reference("m"))
    with pytest.raises(Damaged, match="80 bytes"):
        backend.read([BlobPart(manifest.blobs[0], 40, memoryview(bytearray(41)))])
    version = VersionKey("m", "1", 5)
    with pytest.raises(Damaged, match="keys"):
        with_handles(version, manifest, ())
    with pytest.raises(Damaged, match="key of tensor 0"):
        with_handles(version, manifest, (key_of(b"1234"),))
    backend.close()


def test_one_request_to_each_provider(pair: Cluster) -> None:
    with pair.repository() as repo:
        repo.save(weights(0, 40), "m@1")
        for node in pair.nodes.values():
            node.calls.clear()
        assert same(dict(repo.open("m@1").value()), weights(0, 40))
        assert [node.calls["read_part"] for node in pair.nodes.values()] == [1, 1]


# -- what is shared ----------------------------------------------------------------------------


def test_tensors_of_the_parent_are_not_sent_again(pair: Cluster) -> None:
    with pair.repository() as repo:
        base = weights(0, 40)
        repo.save(base, "base@1")
        before = sum(node.sent for node in pair.nodes.values())
        child = {**base, "w7": torch.randn(107)}
        repo.save(child, "child@1", parent="base@1")
        assert sum(node.sent for node in pair.nodes.values()) - before == 107 * 4
        repo.remove("base@1")
        repo.gc(quiet=0)
        assert same(repo.load("child"), child)
        assert repo.verify().problems == []


def test_a_parent_that_goes_meanwhile_is_no_harm(pair: Cluster) -> None:
    with pair.repository() as repo, pair.repository() as other:
        repo.save(weights(0), "base@1")

        def interfere(name: str) -> None:
            if name == "put_part":
                for node in pair.nodes.values():
                    node.before = None
                other.remove("base@1")

        for node in pair.nodes.values():
            node.before = interfere
        repo.save(weights(0), "child@1", parent="base@1")
        assert same(repo.load("child"), weights(0))
        assert repo.verify().problems == []


def test_placement_by_content_shares_a_family_and_its_load() -> None:
    """Siblings with one backbone: by content they share it, by model each name has its own."""
    live = {}
    for policy in ("content", "model"):
        cluster = Cluster(4, placement=policy)
        with cluster.repository() as repo:
            backbone = weights(0, 40)
            for number in range(12):
                head = torch.full((10,), float(number))
                repo.save({**backbone, "head": head}, f"family/{number}@1")
            repo.flush()
            swept = repo.gc(quiet=0)
            holders = [len(some) for some in cluster.parts().values()]
            live[policy] = swept.live
            assert (min(holders) > 0) or policy == "model"
            assert repo.verify().problems == []
        cluster.close()
    one = sum(tensor.nbytes for tensor in weights(0, 40).values())
    assert live["content"] == one + 12 * 40
    assert live["model"] >= 2 * one


def test_every_provider_gets_a_fair_part_and_adding_one_moves_only_to_it() -> None:
    members = Cluster(4).members.members
    keys = [bytes([n % 256, n // 256]) for n in range(4000)]
    first = [order(members, key)[0].name for key in keys]
    assert all(800 < first.count(m.name) < 1200 for m in members)
    fewer = [order(members[:3], key)[0].name for key in keys]
    assert all(a in (b, "p3") for a, b in zip(first, fewer, strict=True))


# -- gc, closing, forks ------------------------------------------------------------------------


def test_gc_keeps_a_save_under_way_and_what_silent_homes_may_have(twins: Cluster) -> None:
    with twins.repository() as repo, twins.repository() as other:
        home = twins.nodes[places(twins.members, HEAD, "m")[0].name]

        def interfere(name: str) -> None:
            if name == "put_head":
                home.before = None
                other.gc(quiet=3600)

        home.before = interfere
        repo.save(weights(0), "m@1")
        assert same(repo.load("m"), weights(0))
        repo.remove("m@1")
        other.gc(quiet=3600)
        assert nothing_left(twins)
        version = home.provider.reserve("late", "1")
        keep = twins.backend()
        repo.save(weights(1), "other@1")
        del version
        twins.nodes["p1"].dead = True
        other.gc(quiet=0)
        twins.nodes["p1"].dead = False
        assert same(repo.load("other"), weights(1))
        keep.close()


def test_a_closed_cluster_says_so_and_leaves_no_threads(pair: Cluster) -> None:
    before = {thread.name for thread in threading.enumerate()}
    backend = pair.backend()
    repo = Repository(backend, durability=pair.durability)
    repo.save(weights(0, 40), "m@1")
    repo.close()
    repo.close()
    after = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("sapwood-p") for name in after - before)
    with pytest.raises(StoreError, match="closed"):
        repo.models()


def test_a_forked_process_uses_connections_of_its_own(tmp_path: Path) -> None:
    # The folders are of processes that outlive the fork; here only the client's side is looked at.
    cluster = Cluster(2, root=tmp_path)
    made: list[int] = []
    connect = cluster.connect

    def counted(member, epoch):  # type: ignore[no-untyped-def]
        made.append(os.getpid())
        return connect(member, epoch)

    backend = ClusterBackend("cluster", cluster.members, counted)
    repo = Repository(backend)
    repo.save(weights(0, 40), "m@1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            good = same(repo.load("m"), weights(0, 40)) and made.count(os.getpid()) == 2
            repo.close()
            code = 0 if good else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert same(repo.load("m"), weights(0, 40))
    repo.close()
    cluster.close()
