"""Nodes on one machine: a folder and a peer server each, in threads or in processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sapwood.tiers.parity import ParityTier
from sapwood.tiers.partner import PartnerTier
from sapwood.tiers.peers import PeerServer
from sapwood.tiers.spec import NodeMap

TOKEN = "a token that is never sent"
_PROGRAM = """
import sys
from pathlib import Path
from sapwood.tiers.peers import PeerServer
folder, token = sys.argv[1:]
with PeerServer(Path(folder), token) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@dataclass
class Process:
    """A peer server in a process of its own."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self.folder), TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.env},
        )
        assert self._popen.stdout is not None
        self.address = self._popen.stdout.readline().strip()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)

    def stop(self) -> None:
        """Returns when it has stopped: a signal may take effect a little later."""
        self._popen.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._popen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate(timeout=10)


class Cluster:
    """Nodes a, b, c, ...: each has a rank of that number."""

    def __init__(self, root: Path, count: int, processes: tuple[str, ...] = ()) -> None:
        self.root = root
        self.names = tuple("abcdefgh"[:count])
        self.servers: dict[str, PeerServer | Process] = {}
        self._tiers: list[ParityTier | PartnerTier] = []
        for name in self.names:
            self.start(name, process=name in processes)

    def folder(self, name: str) -> Path:
        return self.root / name

    def start(self, name: str, *, process: bool = False, **env: str) -> None:
        folder = self.folder(name)
        if name in self.servers:
            self.servers[name].close()
        if process:
            self.servers[name] = Process(folder, env)
        else:
            self.servers[name] = PeerServer(folder, TOKEN).start()

    def nodes(self, name: str, token: str = TOKEN) -> NodeMap:
        addresses = {n: server.address for n, server in self.servers.items()}
        return NodeMap(node=name, rank_nodes=self.names, addresses=addresses, token=token)

    def parity(self, name: str, scheme: str, **options: float) -> ParityTier:
        tier = ParityTier(scheme, self.nodes(name), self.folder(name), **options)
        self._tiers.append(tier)
        return tier

    def partner(self, name: str, **options: float) -> PartnerTier:
        tier = PartnerTier(self.nodes(name), self.folder(name), **options)
        self._tiers.append(tier)
        return tier

    def wipe(self, name: str) -> None:
        shutil.rmtree(self.folder(name), ignore_errors=True)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        for server in self.servers.values():
            server.close()


@contextmanager
def cluster(root: Path, count: int, processes: tuple[str, ...] = ()) -> Iterator[Cluster]:
    nodes = Cluster(root, count, processes)
    try:
        yield nodes
    finally:
        nodes.close()
