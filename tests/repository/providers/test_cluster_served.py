"""Clusters of real provider processes: killed, stopped, added and taken away while clients work."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sapwood.errors import (
    ConfigError,
    Denied,
    ModelExists,
    ModelNotFound,
    SapwoodError,
    StorageError,
    Unreachable,
)
from sapwood.store import Repository
from sapwood.store import open as open_repository
from tests.repository.providers.served import TOKEN, Servers


def weights(seed: int, count: int = 16, size: int = 3000) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(size + n, generator=made) for n in range(count)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path, 2, replicas=2) as servers:
        yield servers


@pytest.mark.parametrize(("count", "placement"), [(1, "content"), (4, "content"), (4, "model")])
def test_models_come_back_from_any_number_of_providers(
    count: int, placement: str, tmp_path: Path
) -> None:
    with Servers(tmp_path, count, placement=placement) as servers, servers.open() as repo:
        large = {"large": torch.randn(2**20), "empty": torch.empty(0, 3), **weights(0)}
        repo.save(large, "m@1", tags=["best"], metrics={"loss": 0.5}, note={"why": "test"})
        repo.save({**large, "w3": torch.zeros(3)}, "m@2", parent="m@1")
        with servers.open(local=False) as far:
            assert same(far.load("m@best"), large)
            assert torch.equal(far.open("m@1")["large"][10:20], large["large"][10:20])
        loaded = repo.load("m@1")
        loaded["large"].zero_()
        assert same(repo.load("m@1"), large)
        assert [record.version for record in repo.log("m")] == ["2", "1"]
        assert [c.name for c in repo.diff("m@1", "m@2") if c.kind != "same"] == ["w3"]
        repo.flush()
        assert repo.verify().problems == []
        with pytest.raises(ModelExists):
            repo.save(weights(1), "m@1")


def working(
    repo: Repository, name: str, stop: threading.Event, done: dict[str, int], failed: list[str]
) -> Callable[[], None]:
    """Saves and loads until told to stop; what went wrong but for silent providers."""

    def work() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            reference, seed = f"{name}@{turn}", hash((name, turn)) % 2**31
            try:
                repo.save(weights(seed), reference)
                done[reference] = seed
                known = random.choice(list(done))
                if not same(repo.load(known), weights(done[known])):
                    failed.append(f"{known} is another one")
            except Unreachable as error:
                if "provider" not in str(error):
                    failed.append(f"{error!r} names no provider")
            except ModelExists:
                failed.append(f"{reference} was there before it was saved")
            except SapwoodError as error:
                failed.append(f"{reference}: {error!r}")

    return work


def run_beside(servers: Servers, disturb: Callable[[], None], clients: int = 2) -> dict[str, int]:
    """What was saved by clients that worked meanwhile."""
    stop, done, failed = threading.Event(), dict[str, int](), list[str]()
    repos = [servers.open(timeout=20.0) for _ in range(clients)]
    threads = [
        threading.Thread(target=working(repo, f"c{n}", stop, done, failed))
        for n, repo in enumerate(repos)
    ]
    for thread in threads:
        thread.start()
    try:
        disturb()
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
        for repo in repos:
            repo.close()
    assert failed == []
    return done


def check(servers: Servers, done: dict[str, int]) -> None:
    with servers.open() as repo:
        repo._backend.membership.repair(said=lambda _: None)
        for reference, seed in done.items():
            assert same(repo.load(reference), weights(seed)), reference
        repo.flush()
        assert repo.verify().problems == []
        for record in repo.models():
            seed = hash((record.name, int(record.version))) % 2**31
            assert same(repo.load(str(record.reference)), weights(seed))


@pytest.mark.parametrize("replicas", [1, 2])
def test_killed_providers_leave_every_version_whole(replicas: int, tmp_path: Path) -> None:
    with Servers(tmp_path, 2, replicas=replicas) as servers:

        def disturb() -> None:
            for number in (0, 1, 0):
                time.sleep(random.uniform(0.2, 0.6))
                victim = servers.servers[number]
                victim.kill()
                time.sleep(0.2)
                victim.start()
                victim.ready()
            time.sleep(0.5)

        done = run_beside(servers, disturb)
        assert done
        check(servers, done)


def test_with_two_copies_everything_goes_on_while_one_is_gone(twins: Servers) -> None:
    with twins.open() as repo:
        repo.save(weights(1), "m@1")
        twins.servers[1].kill()
        assert same(repo.load("m@1"), weights(1))
        repo.save(weights(2), "m@2")
        with pytest.raises(Unreachable, match="p1"):
            repo.save(weights(3), "m@3", durability="replicated")
        assert [record.version for record in repo.models()] == ["1", "2"]
        listed = twins.command("members", "ls")
        assert listed.returncode == 1
        assert "p1" in listed.stdout
        assert "Connection refused" in listed.stdout
        twins.servers[1].start()
        twins.servers[1].ready()
        twins.servers[0].kill()
        assert same(repo.load("m@1"), weights(1))
        with pytest.raises(StorageError, match="p0"):
            repo.load("m@2")
        twins.servers[0].start()
        twins.servers[0].ready()
        mended = twins.command("members", "repair")
        assert mended.returncode == 0, mended.stdout + mended.stderr
        twins.servers[0].kill()
        assert same(repo.load("m@2"), weights(2))


def test_a_stopped_provider_is_left_behind_after_the_timeout(twins: Servers) -> None:
    with twins.open(timeout=1.0) as repo:
        repo.save(weights(1), "m@1")
        twins.servers[1].signal(signal.SIGSTOP)
        try:
            assert same(repo.load("m@1"), weights(1))
            repo.save(weights(2), "m@2")
            began = time.monotonic()
            assert same(repo.load("m@2"), weights(2))
            assert time.monotonic() - began < 20
        finally:
            twins.servers[1].signal(signal.SIGCONT)
    check_versions = {"m@1": 1, "m@2": 2}
    with twins.open() as repo:
        repo._backend.membership.repair(said=lambda _: None)
        for reference, seed in check_versions.items():
            assert same(repo.load(reference), weights(seed))
        assert repo.verify().problems == []


def test_a_killed_client_leaves_nothing_half_saved(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    script = (
        "import sys, torch\n"
        "from sapwood.store import open\n"
        "repo = open(sys.argv[1], token=sys.argv[2])\n"
        "print('begin', flush=True)\n"
        "for n in range(10**6):\n"
        "    repo.save({f'w{i}': torch.full((50000,), float(n + i)) for i in range(8)}, f'm@{n}')\n"
    )
    with Servers(tmp_path, 2) as servers:
        process = subprocess.Popen(
            [sys.executable, "-c", script, servers.url, TOKEN],
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.uniform(0.2, 0.8))
        process.kill()
        process.wait(30)
        process.stdout.close()
        with servers.open() as repo:
            for record in repo.models():
                value = repo.load(str(record.reference))
                first = float(record.version)
                assert all(torch.all(value[f"w{i}"] == first + i) for i in range(8))
            last = len(repo.models())
            repo.save({"w": torch.ones(3)}, f"m@{last}")  # what it was saving is free again
            repo.gc(quiet=0)
            assert repo.verify().problems == []
            states = repo._backend.membership.states()
            assert sum(state.tensors for state in states) == 8 * last + 1


def test_membership_by_command_while_clients_work(tmp_path: Path) -> None:
    with Servers(tmp_path, 2, spare=2) as servers:
        reports = []

        def disturb() -> None:
            time.sleep(0.5)
            added = servers.add()
            said = servers.command("members", "join", f"{added.name}={added.address}", "--json")
            assert said.returncode == 0, said.stdout + said.stderr
            reports.append(json.loads(said.stdout))
            said = servers.command("members", "leave", "p0")
            assert said.returncode == 0, said.stdout + said.stderr

        done = run_beside(servers, disturb)
        assert reports[0]["problems"] == []
        servers.servers[0].stop()
        listed = servers.command("members", "ls", "--json")
        assert listed.returncode == 0, listed.stdout
        found = json.loads(listed.stdout)
        assert [one["name"] for one in found["provider"]] == ["p1", "p2"]
        assert found["moving"] is False
        assert all(one["versions"] for one in found["provider"])
        check(servers, done)


def test_the_command_line_works_on_providers(tmp_path: Path) -> None:
    torch.save(weights(5), tmp_path / "m.pt")
    with Servers(tmp_path, 2) as servers:
        for words in (
            ["put", str(tmp_path / "m.pt"), "nt3/m@1", "--tag", "best", "--metric", "loss=0.5"],
            ["ls"],
            ["show", "nt3/m@best"],
            ["tag", "nt3/m@1", "good"],
            ["untag", "nt3/m@good"],
            ["get", "nt3/m", str(tmp_path / "out.pt")],
            ["gc"],
            ["verify"],
            ["rm", "nt3/m@1", "--yes"],
        ):
            said = servers.command(*words)
            assert said.returncode == 0, f"{words}: {said.stdout}{said.stderr}"
        assert same(torch.load(tmp_path / "out.pt"), weights(5))
        assert "there is no model" in servers.command("show", "nt3/m").stderr
        said = servers.command("members", "leave", "p9")
        assert said.returncode == 1
        assert "there are p0, p1" in said.stderr


def test_who_has_no_right_token_or_address_is_told(tmp_path: Path) -> None:
    with Servers(tmp_path, 1) as servers:
        with pytest.raises(Denied, match="token"):
            open_repository(servers.url, token="a-wrong-token-of-a-stranger")
        with pytest.raises(ConfigError, match="SAPWOOD_STORE_TOKEN"):
            open_repository(servers.url)
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            open_repository("sapwood://127.0.0.1:1", token=TOKEN)
        with pytest.raises(ConfigError, match="host:port"):
            open_repository("sapwood://", token=TOKEN)
        with pytest.raises(ConfigError, match="host:port"):
            open_repository("sapwood://nowhere", token=TOKEN)
        with pytest.raises(ConfigError, match="replicated"):
            servers.open(durability="replicated")
        with servers.open() as repo, pytest.raises(ModelNotFound):
            repo.load("nothing")
        with pytest.raises(ConfigError, match="token="):
            open_repository(tmp_path / "folder", token=TOKEN)
