"""Many clients of one provider at once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sapwood.buffers import FaultCount
from sapwood.buffers.mapping import HUGE_PAGE
from sapwood.channel.handshake import key_of as token_key
from sapwood.errors import Damaged, Gone, ModelExists, ModelNotFound
from sapwood.repository.names import Reference
from sapwood.repository.providers.local import open_provider
from sapwood.repository.providers.placement import key_of
from sapwood.repository.providers.remote import RemoteProvider
from sapwood.repository.providers.rights import owner_rights
from sapwood.repository.providers.server import ProviderServer
from tests.repository.providers.conftest import Host, connected
from tests.repository.providers.host import READER, TOKEN
from tests.repository.providers.models import load, put, quiet, read, save, tensor, version_of

ROUNDS = 12


def together(*works: Callable[[], None]) -> None:
    """Run side by side; the first error of any."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_writers_readers_and_gc(host: Host, tmp_path: Path, kind: str) -> None:
    address = host.serve("memory:" if kind == "memory" else str(tmp_path / "p"))
    frozen = tensor("frozen", 300_000)
    expected: dict[str, list[bytes]] = {}
    ended = threading.Event()

    def write(number: int, provider: RemoteProvider) -> None:
        chance = random.Random(number)
        for n in range(ROUNDS):
            tensors = [
                frozen,
                *(tensor((number, n, i), chance.choice((9, 70_000, 400_000))) for i in range(3)),
            ]
            name = f"m{number}/{n}"
            expected[name] = tensors
            record = save(provider, name, "1", tensors)
            if n % 3 == 2:
                provider.remove_head(version_of(record))
                provider.drop_part(version_of(record))

    def look(provider: RemoteProvider) -> None:
        while not ended.is_set():
            for record in provider.models("*"):
                try:
                    assert load(provider, f"{record.name}@1") == expected[record.name]
                except (ModelNotFound, Gone):
                    continue  # it was removed since
                except AssertionError as error:
                    if provider.has_head(version_of(record)):
                        raise AssertionError(record.name) from error

    def sweep(provider: RemoteProvider) -> None:
        while not ended.is_set():
            provider.gc(quiet=3600.0, said=quiet)

    ways = ("unix", "tcp", "unix")
    clients = [connected(address, way=way) for way in (*ways, "unix", "tcp", "tcp")]
    writers = [lambda n=n: write(n, clients[n]) for n in range(3)]

    def write_all() -> None:
        try:
            together(*writers)
        finally:
            ended.set()

    together(
        write_all, lambda: look(clients[3]), lambda: look(clients[4]), lambda: sweep(clients[5])
    )
    found = clients[0].verify(said=quiet)
    assert (found.problems, found.models) == ([], 3 * ROUNDS * 2 // 3)
    for client in clients:
        client.close()


def test_one_of_many_saves_a_version(host: Host) -> None:
    address = host.serve("memory:")
    wins: list[int] = []

    def attempt(number: int) -> None:
        with closing(connected(address, way="unix" if number % 2 else "tcp")) as provider:
            for n in range(5):
                try:
                    save(provider, "a", str(n), [tensor((number, n), 50_000)])
                except ModelExists:
                    continue
                wins.append(n)

    together(*(lambda n=n: attempt(n) for n in range(4)))
    assert sorted(wins) == list(range(5))


def test_one_client_is_used_by_many_threads(host: Host) -> None:
    with closing(connected(host.serve("memory:"), way="unix")) as provider:

        def work(number: int) -> None:
            for n in range(6):
                tensors = [tensor((number, n), size) for size in (5, 300_000)]
                save(provider, f"m{number}", str(n), tensors)
                assert load(provider, f"m{number}@{n}") == tensors

        together(*(lambda n=n: work(n) for n in range(12)))
        assert len(provider.models("*")) == 72


def test_what_gc_wrote_anew_is_sent_and_not_passed(host: Host) -> None:
    """Whose bytes lie in such a pack is not known, so that it is for those who may read all."""
    address = host.serve("memory:")
    kept, dropped = tensor("kept", 400_000), tensor("dropped", 2_000_000)
    with (
        closing(connected(address, way="unix")) as owner,
        closing(connected(address, READER, way="unix")) as reader,
    ):
        version = version_of(save(owner, "a/x", "1", [kept, dropped]))
        mapped = reader.map_part(version, [key_of(kept)])
        assert mapped is not None
        owner.drop_part(version, [key_of(dropped)])
        assert owner.gc(quiet=0.0, said=quiet).freed > 1_000_000
        assert bytes(mapped[key_of(kept)]) == kept  # what was mapped before stays
        assert reader.map_part(version, [key_of(kept)]) is None
        assert read(reader, version, [key_of(kept)]) == [kept]
        assert owner.map_part(version, [key_of(kept)]) is not None


def test_descriptors_are_not_leaked(host: Host) -> None:
    def open_files() -> tuple[int, int]:
        ours, theirs = (
            sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            for pid in (os.getpid(), host.process.pid)
        )
        return ours, theirs

    with closing(connected(host.serve("memory:"), way="unix")) as provider:
        before = (0, 0)
        for n in range(30):
            record = save(provider, "a", str(n), [tensor(n, 300_000)])
            load(provider, f"a@{n}")
            provider.find(Reference("a"))
            assert provider.map_part(version_of(record), [key_of(tensor(n, 300_000))]) is not None
            provider.remove_head(version_of(record))
            provider.drop_part(version_of(record))
            provider.gc(quiet=0.0, said=quiet)
            before = before if n != 9 else open_files()
        after = open_files()
        assert max(after[0] - before[0], after[1] - before[1]) <= 2


def test_what_is_copied_ahead_is_what_is_saved(host: Host) -> None:
    address = host.serve("memory:")
    tensors = [tensor(n, size) for n, size in enumerate((300_000, 5, 70_000))]
    sources = [memoryview(data) for data in (tensors[0], b"", *tensors[1:])]
    for way in ("unix", "tcp"):
        with closing(connected(address, way=way)) as provider:
            for n in range(3):
                with provider.staged(sources):
                    save(provider, f"{way}{n}", "1", tensors)
                assert load(provider, f"{way}{n}@1") == tensors
            stats = provider._stage.pool().stats()
            assert stats.ahead + stats.late == (3 * HUGE_PAGE if way == "unix" else 0)
            # Others are put all the same, and nothing is put twice.
            with provider.staged(sources):
                save(provider, f"{way}-other", "1", tensors[:1])
            with provider.staged(sources):
                pass
            with pytest.raises(ZeroDivisionError), provider.staged(sources):
                raise ZeroDivisionError
            assert load(provider, f"{way}-other@1") == tensors[:1]


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_damage_is_said_by_who_reads_it(host: Host, tmp_path: Path, way: str) -> None:
    address = host.serve(str(tmp_path / "p"))
    with closing(connected(address, way=way)) as provider:
        small = version_of(save(provider, "small", "1", [tensor(1, 5000)]))
        large = version_of(save(provider, "large", "1", [tensor(2, 6_000_000)]))
        save(provider, "sound", "1", [tensor(3, 5000)])
        packs = [path for path in (tmp_path / "p" / "parts" / "packs").rglob("*") if path.is_file()]
        for pack in packs:
            if pack.stat().st_size == 6_000_000:
                os.truncate(pack, 5_000_000)
            elif pack.read_bytes() == tensor(1, 5000):
                pack.unlink()
        for version, data in ((small, tensor(1, 5000)), (large, tensor(2, 6_000_000))):
            with pytest.raises(Damaged):
                read(provider, version, [key_of(data)])
        assert load(provider, "sound@1") == [tensor(3, 5000)]
        problems = provider.verify(said=quiet).problems
        assert sorted(problem.split("@")[0] for problem in problems) == ["large", "small"]


@pytest.mark.parametrize("staging", ["preallocated", "on_demand"])
def test_memory_that_is_ready_takes_no_page_faults(staging: str) -> None:
    tokens = {token_key(TOKEN): (TOKEN, owner_rights())}
    local = open_provider("memory:", staging=staging)
    server = ProviderServer(local, tokens)
    try:
        with closing(
            RemoteProvider(server.address, TOKEN, local=True, staging=staging)
        ) as provider:
            faults = []
            for n in range(2):
                if staging == "preallocated":
                    provider._stage.pool().prepare(25 * 2**20)
                version = provider.reserve("a", str(n))
                data = [bytes([i]) * (8 * 2**20) + bytes([n]) for i in range(1, 4)]
                with FaultCount() as found:
                    assert put(provider, version, data) == []
                faults.append(found.minor)
                assert read(provider, version, [key_of(one) for one in data]) == data
            stats = provider._stage.pool().stats()
            if staging == "preallocated":
                assert stats.late == 0
                assert max(faults) < 600
            else:
                assert (stats.ahead, stats.ready) == (0, 0)
                assert min(faults) > 6000
    finally:
        server.close()
        local.close()
