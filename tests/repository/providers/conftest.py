"""A provider of each kind, empty."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sapwood
from sapwood.channel.tls import client_context
from sapwood.repository.providers.base import Provider
from sapwood.repository.providers.local import open_provider
from sapwood.repository.providers.remote import RemoteProvider
from tests.repository.providers.host import CHANNEL, TOKEN

ROOT = Path(__file__).parents[3]
KINDS = ("memory", "folder", "memory-unix", "folder-unix", "memory-tcp", "folder-tls")


class Host:
    """The process that serves."""

    def __init__(self) -> None:
        source = str(Path(sapwood.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.repository.providers.host"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def serve(self, place: str, way: str = "tcp") -> str:
        """The address of a new provider."""
        address = self.ask(f"open {place} {way}")
        assert address, "the process that serves has died"
        return address

    def close(self) -> None:
        assert self.ask("close") == "closed"


@pytest.fixture(scope="session")
def hosting() -> Iterator[Host]:
    host = Host()
    yield host
    assert host.process.stdin is not None
    host.process.stdin.close()
    assert host.process.wait(20) == 0
    assert host.process.stdout is not None
    host.process.stdout.close()


@pytest.fixture
def host(hosting: Host) -> Iterator[Host]:
    yield hosting
    hosting.close()


def connected(address: str, token: str = TOKEN, way: str = "tcp") -> RemoteProvider:
    tls = client_context(CHANNEL / "server.cert.pem") if way == "tls" else None
    return RemoteProvider(address, token, tls=tls, local=way == "unix", timeout=20.0)


@pytest.fixture(params=KINDS)
def provider(request: pytest.FixtureRequest, tmp_path: Path, hosting: Host) -> Iterator[Provider]:
    kind, _, way = request.param.partition("-")
    place = "memory:" if kind == "memory" else str(tmp_path / "place")
    if not way:
        opened: Provider = open_provider(place)
        yield opened
        opened.close()
        return
    remote = connected(hosting.serve(place, way), way=way)
    yield remote
    remote.close()
    hosting.close()
