"""Real servers that are killed, stopped, or out of room, and what is there afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import sapwood
from sapwood.errors import ConfigError, NoRoom, SapwoodError, Unreachable
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import VersionKey
from sapwood.repository.providers.local import open_provider
from sapwood.repository.providers.remote import RemoteProvider
from sapwood.storage import Durability
from tests.repository.providers.models import head_of, load, put, quiet, save, tensor, version_of

MODEL = [tensor(n, 3_000_000) for n in range(8)]
TOKEN_FILE = "provider.token"


class Server:
    """One ``sapwood store serve``."""

    def __init__(self, place: Path | str, *options: str, listen: str = "127.0.0.1:0") -> None:
        source = str(Path(sapwood.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sapwood.cli", "store", "serve", str(place)]
            + ["--listen", listen, *options],
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert " at " in self.line, "it does not serve"
        self.address = self.line.split(" at ")[1].split(";")[0].strip()
        self.token_file = Path(self.line.rpartition(" in ")[2].strip())
        self.token = self.token_file.read_text().strip()

    def client(self, *, local: bool | None = None, timeout: float = 20.0) -> RemoteProvider:
        return RemoteProvider(self.address, self.token, local=local, timeout=timeout)

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> int:
        self.process.terminate()
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
            server.kill()


def test_a_server_says_where_it_is_and_ends_when_it_is_told(
    servers: list[Server], tmp_path: Path
) -> None:
    for place in ("memory:", tmp_path / "p"):
        server = Server(place)
        servers.append(server)
        assert server.line.startswith(f"provider p0 serves {place} at 127.0.0.1:")
        assert server.token_file.stat().st_mode & 0o777 == 0o600
        with closing(server.client()) as client:
            save(client, "a", "1", MODEL[:1])
            assert load(client, "a@1") == MODEL[:1]
            assert server.close() == 0
            with pytest.raises(Unreachable):
                client.models("*")
        assert server.token_file.exists() == (place != "memory:")


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_server_that_is_killed_while_it_writes(
    servers: list[Server], tmp_path: Path, way: str
) -> None:
    chance = random.Random(way)
    kept: dict[str, list[bytes]] = {}
    for round_ in range(3):
        server = Server(tmp_path / "p")
        servers.append(server)
        with closing(server.client(local=way == "unix")) as client:
            for name, tensors in kept.items():
                assert load(client, f"{name}@1") == tensors
            found = client.verify(said=quiet)
            assert (found.problems, found.models) == ([], len(kept))
            timer = threading.Timer(chance.uniform(0.05, 0.6), server.process.kill)
            timer.start()
            try:
                for number in range(1000):
                    tensors = [tensor((round_, number, n), 500_000) for n in range(4)]
                    name = f"m{round_}-{number}"
                    save(client, name, "1", tensors)
                    kept[name] = tensors
            except SapwoodError:
                pass
            timer.join()
        server.kill()
        # What was answered is there. The one on its way is there whole, or not at all.
        with closing(open_provider(tmp_path / "p")) as provider:
            late = {one.name for one in provider.models("*")} - kept.keys()
            assert len(late) <= 1
            kept |= {name: load(provider, f"{name}@1") for name in late}
            provider.gc(quiet=0.0, said=quiet)
            assert provider.verify(said=quiet).problems == []


DYING = """
import sys, os, threading
sys.path.insert(0, {root!r})
from tests.repository.providers.models import *
from sapwood.repository.providers.remote import RemoteProvider
client = RemoteProvider({address!r}, {token!r}, local={local})
version = client.reserve("a", "1")
put(client, version, [tensor(1, 5_000_000)])
print("half", flush=True)
put(client, version, [tensor(2, 5_000_000)])
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("local", [True, False])
def test_a_client_that_is_killed_while_it_saves(servers: list[Server], local: bool) -> None:
    server = Server("memory:", "--memory", "30MB")
    servers.append(server)
    script = DYING.format(
        root=str(Path(__file__).parents[3]), address=server.address, token=server.token, local=local
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    with closing(server.client()) as client:
        assert client.models("*") == []
        (part,) = client.parts()
        client.drop_part(part.version)
        assert client.gc(quiet=0.0, said=quiet).live == 0
        for _ in range(2000):  # the provider hears of the client's end a moment later
            try:
                save(client, "a", "1", [tensor(n, 5_000_000) for n in range(5)])
            except sapwood.errors.ModelExists:
                continue
            break
        assert load(client, "a@1") == [tensor(n, 5_000_000) for n in range(5)]


def test_a_server_that_is_stopped_is_named(servers: list[Server]) -> None:
    server = Server("memory:")
    servers.append(server)
    with closing(server.client(timeout=0.5)) as client:
        save(client, "a", "1", [b"x"])
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unreachable, match=rf"provider p0 at {server.address} did not answer"):
            client.find(Reference("a"))
        other = server.client(timeout=0.5)
        with pytest.raises(Unreachable, match=f"the provider at {server.address} did not answer"):
            other.members()
        other.close()
        server.process.send_signal(signal.SIGCONT)
    with closing(server.client()) as client:
        assert load(client, "a@1") == [b"x"]


def test_a_server_that_begins_again_is_found_by_its_clients(
    servers: list[Server], tmp_path: Path
) -> None:
    first = Server(tmp_path / "p")
    servers.append(first)
    with closing(first.client()) as client:
        saved = save(client, "a", "1", MODEL)
        first.kill()
        with pytest.raises(Unreachable):
            client.has_head(version_of(saved))
        second = Server(tmp_path / "p", listen=first.address)
        servers.append(second)
        assert second.token == first.token
        assert load(client, "a@1") == MODEL


def fill(client: RemoteProvider, version: VersionKey) -> None:
    for n in range(20):
        put(client, version, [tensor((n, "x"), 1_500_000)])


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, which takes root")
@pytest.mark.parametrize("local", [True, False])
def test_a_full_disk(servers: list[Server], tmp_path: Path, local: bool) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", small], check=True)
    try:
        server = Server(small / "p")
        servers.append(server)
        with closing(server.client(local=local)) as client:
            save(client, "a", "1", MODEL)
            version = client.reserve("b", "1")
            with pytest.raises(NoRoom):
                put(client, version, [tensor(n, 3_000_000) for n in range(20, 28)])
            (small / "filler").write_bytes(bytes(8_000_000))
            # It seemed to fit when it was asked for.
            with pytest.raises(NoRoom):
                fill(client, version)
            assert load(client, "a@1") == MODEL
            (small / "filler").unlink()
            client.drop_part(version)
            client.gc(quiet=0.0, said=quiet)
            save(client, "c", "1", [tensor("c", 5_000_000)])
            assert client.verify(said=quiet).problems == []
        assert server.close() == 0
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_was_synced_is_said_to_be(servers: list[Server], tmp_path: Path) -> None:
    server = Server(tmp_path / "p")
    servers.append(server)
    with closing(server.client()) as client:
        version = client.reserve("a", "1")
        assert put(client, version, MODEL, Durability.SYNCED) == []
        client.put_head(head_of(version, MODEL), synced=True)
    server.kill()
    with closing(open_provider(tmp_path / "p")) as provider:
        assert load(provider, "a@1") == MODEL


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    from sapwood.repository.providers.serving import (
        Served,
        ServeSettings,
        parse_members,
        parse_size,
    )

    free = "127.0.0.1:0"
    public = tmp_path / "public.token"
    public.write_text("a-token-that-all-can-read\n")
    public.chmod(0o644)
    rights = tmp_path / "rights.toml"
    rights.write_text('[x]\ntoken-file = "public.token"\nrights = { "a*b" = ["read"] }\n')
    for wrong, said in (
        ({"listen": "nowhere"}, "expected host:port"),
        ({"listen": "0.0.0.0:0"}, "--advertise"),
        ({"name": "../x"}, "no name of a provider"),
        ({"tls_cert": tmp_path}, "go together"),
        ({"replicas": 2}, "as many --members"),
        ({"members": "p1=h:1"}, "does not name this provider"),
        ({"members": "p0=h:1"}, "but it is at"),
        ({"memory": 5, "place": str(tmp_path / "p")}, "memory:"),
        ({"token_file": public}, "others can read"),
        ({"rights": rights}, "beginning of names"),
        ({"staging": "never"}, "on_demand"),
    ):
        settings = ServeSettings(**{"place": "memory:", "listen": free, **wrong})
        with pytest.raises(ConfigError, match=said):
            Served(settings)
    assert [parse_size(text) for text in ("5", "4GB", "1.5 MiB", "2k")] == [
        5,
        4 * 10**9,
        3 * 2**19,
        2000,
    ]
    assert [one.name for one in parse_members("a=h:1, b=[::1]:2")] == ["a", "b"]
    for text in ("4 hours", "", "-1"):
        with pytest.raises(ConfigError):
            parse_size(text)
    for text in ("a", "a=h", "a=h:1,a=h:2"):
        with pytest.raises(ConfigError):
            parse_members(text)


def test_a_rights_file_gives_each_token_its_own(servers: list[Server], tmp_path: Path) -> None:
    for name in ("one", "two"):
        path = tmp_path / f"{name}.token"
        path.write_text(f"the-token-of-number-{name}\n")
        path.chmod(0o600)
    rights = tmp_path / "rights.toml"
    rights.write_text(
        '[one]\ntoken-file = "one.token"\nrights = { "a/*" = ["write", "read"] }\n'
        '[two]\ntoken-file = "two.token"\nrights = { "a/x" = ["read"] }\n'
    )
    owner = tmp_path / "owner.token"
    server = Server(
        tmp_path / "p", "--rights", str(rights), "--token-file", str(owner), "--name", "p7"
    )
    servers.append(server)
    with (
        closing(RemoteProvider(server.address, "the-token-of-number-one", name="p7")) as one,
        closing(RemoteProvider(server.address, "the-token-of-number-two")) as two,
        closing(RemoteProvider(server.address, owner.read_text().strip(), name="p8")) as wrong,
    ):
        save(one, "a/x", "1", MODEL)
        save(one, "a/y", "1", MODEL)
        assert [one.name for one in two.models("*")] == ["a/x"]
        assert load(two, "a/x@1") == MODEL
        with pytest.raises(ConfigError, match="is the provider 'p7', not 'p8'"):
            wrong.members()


def test_a_forked_child_has_connections_of_its_own(servers: list[Server]) -> None:
    server = Server("memory:")
    servers.append(server)
    with closing(server.client()) as client:
        save(client, "a", "1", MODEL)
        child = os.fork()
        if not child:
            code = 1
            try:
                save(client, "b", "1", MODEL)
                code = int(load(client, "a@1") != MODEL)
            finally:
                os._exit(code)
        for _ in range(20):
            assert load(client, "a@1") == MODEL
        assert os.waitpid(child, 0)[1] == 0
        assert load(client, "b@1") == MODEL
        assert client.reserve("c", "1") != VersionKey("c", "1", 0)
