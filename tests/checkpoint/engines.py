"""Real engines for tests: started, found by their socket, and seen to end."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sapwood.buffers import Arena
from sapwood.checkpoint.engine import start_engine
from sapwood.checkpoint.engine.address import Address, find_address, resolved
from sapwood.checkpoint.engine.base import Durable, Failed, Freed, Job, Progress
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.checkpoint.settings import CheckpointSettings, tier_specs
from sapwood.state.shards import ShardPlan
from sapwood.testing import faults
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import NodeMap
from tests.tiers import shards

TOKEN = "secret of the group"
PATIENCE = 30.0


def nodes(name: str = "n0", world: int = 1) -> NodeMap:
    return NodeMap(node=name, rank_nodes=(name,) * world)


def address(place: Path, name: str = "n0", tiers: tuple[str, ...] | None = None) -> Address:
    return find_address(resolved(tier_specs(place, tiers)), nodes(name))


def pid_of(where: Address) -> int | None:
    """The process that listens there; None if nobody does."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(where.socket)
        except ConnectionRefusedError:
            return None
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", raw)[0])


def until(done: Any, what: str, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"not in {timeout:g} s: {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def see_end(pid: int | None, timeout: float = PATIENCE) -> None:
    assert pid is not None
    until(lambda: not running(pid), f"the end of engine {pid}", timeout)


class Rank:
    """A rank without a training: lends arenas and submits shards with known bytes."""

    def __init__(
        self,
        place: Path,
        *,
        rank: int = 0,
        world: int = 1,
        node: str = "n0",
        token: str = TOKEN,
        tiers: tuple[str, ...] | None = None,
        large: int = 64,
        **settings: Any,
    ) -> None:
        self.rank, self.world = rank, world
        self.plan: ShardPlan = shards.plan(world, large=large)
        self.heard: list[Progress] = []
        self.changed = threading.Condition()
        self.log = place.parent / f"engine-{node}.log"
        self.specs = tier_specs(place, tiers)
        self.nodes = nodes(node, world)
        engine = start_engine(
            specs=self.specs,
            nodes=self.nodes,
            settings=CheckpointSettings(**settings),
            listener=self._listen,
            rank=rank,
            token=token,
            log=self.log,
        )
        assert isinstance(engine, NodeEngine)
        self.engine = engine
        self.arenas: dict[int, Arena] = {}

    def _listen(self, progress: Progress) -> None:
        with self.changed:
            self.heard.append(progress)
            self.changed.notify_all()

    def lend(self) -> int:
        arena = Arena(self.plan.shards[self.rank].nbytes)
        number = self.engine.lend(arena)
        self.arenas[number] = arena
        return number

    def submit(self, step: int, arena: int) -> CheckpointId:
        self.arenas[arena].bytes[:] = shards.fill(self.plan, self.rank, step)
        id = CheckpointId(step, shards.ATTEMPT)
        self.engine.submit(
            Job(
                id=id,
                rank=self.rank,
                arena=arena,
                plan=self.plan,
                created=float(step),
                extras={"step": step, "rank": self.rank},
                tiers=tuple(s.kind for s in self.specs),
            )
        )
        return id

    def of(self, kind: type[Progress]) -> list[Any]:
        with self.changed:
            return [p for p in self.heard if isinstance(p, kind)]

    def durable(self) -> set[tuple[int, str]]:
        return {(p.id.step, p.tier) for p in self.of(Durable)}

    def failed(self) -> set[tuple[int, str]]:
        return {(p.id.step, p.tier) for p in self.of(Failed) if p.final}

    def freed(self) -> list[int]:
        return [p.arena for p in self.of(Freed)]

    def close(self) -> None:
        self.engine.close(PATIENCE)
        for arena in self.arenas.values():
            arena.close()

    def vanish(self) -> None:
        """As if killed: the connection breaks without a goodbye."""
        link = self.engine._link
        assert link is not None
        self.engine._closed.set()
        link.close()
        link.release()
        for arena in self.arenas.values():
            arena.close()


@contextmanager
def rank(place: Path, **options: Any) -> Iterator[Rank]:
    one = Rank(place, **options)
    pid = one.engine.pid
    try:
        yield one
    finally:
        one.close()
    if one.engine.pid is None and pid is not None:
        see_end(pid)


def descriptors(pid: int) -> set[str]:
    """What the descriptors of a process point to."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(str(entry.readlink()))
    return found


def arenas(pid: int) -> int:
    """How many arenas a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("sapwood-staging")


@contextmanager
def armed(*entries: str) -> Iterator[None]:
    """Arm points in engines that are started inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faults.env(*entries).items():
            patch.setenv(name, value)
        yield
