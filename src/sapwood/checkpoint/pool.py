"""The plan of who saves what, and the staging memory made for it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from sapwood.buffers import Arena
from sapwood.checkpoint.engine import Engine
from sapwood.checkpoint.staging import Staging
from sapwood.checkpoint.witness import Parts
from sapwood.runtime.handle import RunHandle
from sapwood.state.contents import Contents, collect, holders_among
from sapwood.state.shards import ShardPlan, plan_shards

__all__ = ["StagingPool"]

_ARENAS = 2


class StagingPool:
    """Two arenas: one is filled while the other is still on its way."""

    def __init__(self, run: RunHandle, engine: Engine, *, single: bool) -> None:
        """Nothing is planned before ``follow``; ``single`` leaves all the bytes to rank 0."""
        self._run = run
        self._engine = engine
        self._single = single
        self._lock = threading.Lock()
        self._contents: Contents | None = None
        self._plan: ShardPlan | None = None
        self._parts: Parts | None = None
        self._stagings: list[Staging] = []
        self._free: set[int] = set()
        self._retired: dict[int, Arena] = {}

    @property
    def contents(self) -> Contents:
        """What is saved, as of the last plan."""
        assert self._contents is not None
        return self._contents

    @property
    def plan(self) -> ShardPlan:
        """Who saves what."""
        assert self._plan is not None
        return self._plan

    @property
    def parts(self) -> Parts:
        """Who compares what with whom."""
        assert self._parts is not None
        return self._parts

    def follow(self) -> None:
        """Plan anew if the run's tensors are not those of the plan.

        Raises:
            CheckpointError: a tensor is of a kind that cannot be saved.
            OSError: there is no memory for staging.
        """
        if self._contents is not None and self._contents.current():
            return
        run = self._run
        ranks = (0,) if self._single else tuple(range(run.group.world))
        holders = holders_among(ranks, run.model, shares_buffers=run.shares_buffers)
        with run.trace.span("ckpt_plan"):
            contents = collect(run.model, run.optimizer, holders)
            plan = plan_shards(contents.catalog, run.group.world)
            # Before anything of the old plan goes: it may fail, and is then tried again.
            arenas = self._allocate(plan.shards[run.group.rank].nbytes)
            self._contents, self._plan = contents, plan
            self._parts = Parts(plan, contents, single=self._single, buffers=run.shares_buffers)
            shard = plan.shards[run.group.rank]
            self._retire()
            for arena in arenas:
                number = self._engine.lend(arena)
                self._stagings.append(Staging(contents, shard, arena, number))
                self._free.add(number)

    @staticmethod
    def _allocate(nbytes: int) -> list[Arena]:
        with ExitStack() as stack:
            arenas = []
            for _ in range(_ARENAS):
                arenas.append(Arena(nbytes))
                stack.callback(arenas[-1].close)
            stack.pop_all()
        return arenas

    def take(self) -> Staging | None:
        """Free staging memory; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
            return next(s for s in self._stagings if s.number == number)

    def give_back(self, number: int) -> None:
        """Staging memory is no longer needed; that of an old plan goes for good."""
        with self._lock:
            if any(s.number == number for s in self._stagings):
                self._free.add(number)
        self._give_up(number)

    def close(self) -> None:
        """Let go of all memory; the engine has ended."""
        self._retire()
        for arena in self._retired.values():
            arena.close()

    def _retire(self) -> None:
        """Put the staging memory of an old plan aside; what is still on its way ends by itself."""
        with self._lock:
            for staging in self._stagings:
                self._retired[staging.number] = staging.arena
            self._stagings = []
            idle, self._free = self._free, set()
        for number in idle:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        arena = self._retired.pop(number, None)
        if arena is not None:
            self._engine.recall(number)
            arena.close()
