"""A rank's connections to its engine that break at a bad moment, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.base import Failed, Freed, Job, Progress
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.checkpoint.engine.wire import WireError
from sapwood.tiers.record import CheckpointId
from tests.tiers import shards

ID = CheckpointId(4, shards.ATTEMPT)


class FakeWire:
    def __init__(self, *, broken: bool) -> None:
        self.broken = broken

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self.broken:
            raise WireError("the engine died just after its welcome")

    def shut(self) -> None:
        pass


class FakeLink:
    """A connection that says what the test wants."""

    def __init__(self, busy: list[int], under_way: list[list[Any]], *, broken: bool) -> None:
        self.welcome = {"busy": busy, "open": under_way}
        self.wire = FakeWire(broken=broken)
        self.pid = 1
        self.plan, self.plan_number = None, 0
        self.ended = threading.Event()
        self.closed = self.released = False

    def start(self, heard: Callable[..., None], lost: Callable[..., None]) -> None:
        self.lost = lost

    def dead(self, timeout: float = 0.0) -> bool:
        return self.ended.wait(0.01)

    def close(self) -> None:
        self.closed = True

    def release(self) -> None:
        self.released = True


class FakeReach:
    def __init__(self, first: FakeLink, second: FakeLink) -> None:
        self.first, self.second = first, second

    def find_or_start(self, hello: Mapping[str, Any], *, courtesy: float) -> FakeLink:
        return self.first

    def find(self, hello: Mapping[str, Any]) -> FakeLink | None:
        self.first.ended.set()  # it is gone when we look again
        return self.second


def test_an_engine_that_dies_while_it_welcomes_a_rank_again() -> None:
    first = FakeLink([], [], broken=False)
    second = FakeLink([0], [[ID.step, ID.attempt, 0]], broken=True)
    heard: list[Progress] = []
    config = {"specs": [{"kind": "memory"}, {"kind": "external"}]}
    engine = NodeEngine(FakeReach(first, second), config, heard.append)  # type: ignore[arg-type]
    plan = shards.plan(1)
    arenas = [Arena(plan.shards[0].nbytes) for _ in range(2)]
    numbers = [engine.lend(arena) for arena in arenas]
    job = Job(
        id=ID, rank=0, arena=numbers[0], plan=plan, created=0.0, extras={}, tiers=("external",)
    )
    engine.submit(job)
    first.lost(first, "it broke")  # the thread that reads does this
    assert engine.drain(0.0), "nobody will ever report on the shard"
    assert Freed(arena=numbers[0]) in heard
    assert [p.tier for p in heard if isinstance(p, Failed) and p.final] == ["external"]
    assert second.closed
    assert second.released
    engine.close(0.0)
    for arena in arenas:
        arena.close()
