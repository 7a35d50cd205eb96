"""Providers as programs: ``sapwood store serve``, started, killed and started again by tests."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sapwood
from sapwood.store import Repository
from sapwood.store import open as open_repository

TOKEN = "a-token-of-these-tests"
_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


class Served:
    """One provider's process."""

    def __init__(self, name: str, address: str, place: str, options: Sequence[str]) -> None:
        self.name, self.address = name, address
        self._command = [
            sys.executable, "-m", "sapwood", "store", "serve", place,
            "--name", name, "--listen", address, *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        source = str(Path(sapwood.__file__).parents[1])
        self.process = subprocess.Popen(
            self._command,
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], _SECONDS)[0], f"{self.name} is late"
        assert self.address in self.process.stdout.readline()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self.process is not None:
            self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(number)
        self.process.wait(_SECONDS)
        self.process.stdout.close()
        self.process = None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


class Servers:
    """The providers of one repository; ends them at the end of its block."""

    def __init__(
        self,
        root: Path,
        count: int,
        *,
        replicas: int = 1,
        placement: str = "content",
        spare: int = 0,
    ) -> None:
        self._token_file = root / "token"
        self._token_file.write_text(TOKEN)
        self._token_file.chmod(0o600)
        self._root = root
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count + spare)]
        members = ",".join(f"p{n}={self.addresses[n]}" for n in range(count))
        options = ["--members", members, "--replicas", str(replicas), "--placement", placement]
        self.servers = [self._server(n, options) for n in range(count)]
        for server in self.servers:
            server.ready()

    def _server(self, number: int, options: Sequence[str]) -> Served:
        place = str(self._root / f"p{number}")
        more = ["--token-file", str(self._token_file), *options]
        return Served(f"p{number}", self.addresses[number], place, more)

    def add(self) -> Served:
        """One that belongs to nobody yet."""
        self.servers.append(self._server(len(self.servers), ()))
        self.servers[-1].ready()
        return self.servers[-1]

    @property
    def url(self) -> str:
        return "sapwood://" + ",".join(self.addresses[: len(self.servers)])

    def open(self, **more: Any) -> Repository:
        return open_repository(self.url, token=TOKEN, **more)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What the command line says."""
        source = str(Path(sapwood.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "SAPWOOD_STORE_TOKEN": TOKEN}
        return subprocess.run(
            [sys.executable, "-m", "sapwood", "store", *words, "--at", self.url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()
