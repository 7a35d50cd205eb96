"""Carrying captured shards to their tiers, each tier at its own pace.

One thread makes checksums, one thread per tier writes. The staging memory of a shard is given back
as soon as nobody needs it: tiers behind a node's own disk read the shard from there. A tier that
fails is tried again after longer and longer pauses, reported, and at last given up for this shard;
it never holds up another tier. What nobody foresaw is logged with its traceback and reported like
any other failure: a shard always comes to an end, and whoever submitted it hears of it.

A tier without room first loses what came to nothing there. Then whoever knows which checkpoints are
to be kept is told (``NoRoom``), and what they let go is removed before the next try.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood.checkpoint.engine.base import Durable, Failed, Job, Listener, NoRoom
from sapwood.checkpoint.engine.removals import Removals
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.runtime import faults
from sapwood.runtime.heartbeat import beat
from sapwood.runtime.worker import Worker
from sapwood.tiers.base import Mendable, Stored, Tier, read_range
from sapwood.tiers.memory import MemoryTier
from sapwood.tiers.record import CheckpointId, ShardRecord, describe
from sapwood.tiers.room import NoRoomError
from sapwood.tiers.spec import TierSpec

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 30.0
_ON_DISK = "local"
"""The tier that those behind it read from."""


class _Lent:
    """Staging memory, given back when the last user is done with it."""

    def __init__(self, data: Any, given_back: Callable[[], None]) -> None:
        self.data = data
        self._given_back = given_back
        self._users = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._given_back()


@dataclass(kw_only=True)
class _Load:
    """A shard on its way."""

    job: Job
    lent: _Lent
    tell: Listener
    submitted: float = field(default_factory=time.perf_counter)
    record: ShardRecord | None = None
    on_disk: Tier | None = None
    """A tier of this node from which the shard can be read again."""


class Pipeline:
    """The tiers of a node (in ``sync`` mode, of a rank) and the shards on their way there."""

    def __init__(
        self,
        tiers: Sequence[tuple[TierSpec, Tier]],
        tell: Listener,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``tell`` hears of tiers without room, and of shards without a listener of their own.

        It is called on the pipeline's threads. ``on_close`` ends what the tiers need from others,
        after the tiers themselves.
        """
        self._on_close = on_close
        self.tiers = {tier.name: tier for _, tier in tiers}
        self._specs = {tier.name: spec for spec, tier in tiers}
        self._tell = tell
        self._stop = threading.Event()
        self._last_tries = threading.Event()
        self._gone: set[str] = set()
        self._removals = Removals(self.tiers)
        self._open = 0
        self._idle = threading.Condition()
        self._loads: Counter[CheckpointId] = Counter()
        self._drop_later: dict[CheckpointId, None] = {}
        self._checksums = Worker("sapwood-checksums")
        self._workers = {name: Worker(f"sapwood-tier-{name}") for name in self.tiers}

    def submit(
        self,
        job: Job,
        data: Any,
        given_back: Callable[[], None],
        tell: Listener | None = None,
    ) -> None:
        """Carry a shard on; ``given_back`` is called when ``data`` is no longer needed."""
        load = _Load(job=job, lent=_Lent(data, given_back), tell=tell or self._tell)
        with self._idle:
            self._open += 1
            self._loads[job.id] += 1
        self._checksums.submit(lambda: self._describe(load))

    def drop(self, id: CheckpointId, tiers: Sequence[str]) -> None:
        """Remove a checkpoint from some tiers, after what is queued there, or is tried again there.

        From this node's disk only when no tier behind it still reads it there.
        """
        for name in self.tiers.keys() & set(tiers):
            with self._idle:
                busy = self._loads[id] > 0
                if name == _ON_DISK and busy:
                    self._drop_later[id] = None
                    continue
            if busy:  # what is queued may be of this very checkpoint
                self._workers[name].submit(lambda name=name: self._removals.remove(name, id))  # type: ignore[misc]
            else:
                self._removals.add(name, id)
                self._workers[name].submit(lambda name=name: self._removals.run(name))  # type: ignore[misc]

    def mend(self, id: CheckpointId) -> None:
        """Have tiers that rest on several nodes write anew what was lost of a checkpoint."""
        for name, tier in self.tiers.items():
            if isinstance(tier, Mendable):
                with self._idle:
                    self._open += 1
                self._workers[name].submit(lambda tier=tier: self._mend(tier, id))  # type: ignore[misc]

    def hurry(self, *, hurried: bool = True) -> None:
        """No rank is left, or one is back: whether a shard that fails is not tried again.

        Nor are those behind it tried at the same tier. What is being written, however slowly, goes
        on.
        """
        if hurried == self._last_tries.is_set():
            return
        if hurried:
            self._last_tries.set()
        else:
            self._last_tries.clear()
            self._gone.clear()
        self._removals.end(over=hurried)

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is on its way; False if that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is on its way, then end; False if something had to be given up."""
        done = self.drain(timeout)
        self._stop.set()
        self._removals.end()
        for worker in (self._checksums, *self._workers.values()):
            worker.close(5.0)
        for tier in self.tiers.values():
            tier.close()
        self._on_close()
        return done

    # -- on the threads ----------------------------------------------------------------------

    def _describe(self, load: _Load) -> None:
        job = load.job
        names = [name for name in self.tiers if name in job.tiers]
        try:
            faults.point("engine.describe", step=job.id.step, rank=job.rank)
            load.record = describe(
                id=job.id,
                world=len(job.plan.shards),
                catalog=job.plan.catalog,
                shard=job.plan.shards[job.rank],
                data=load.lent.data,
                created=job.created,
                extras=job.extras,
                extras_bytes=job.extras_bytes,
                lineage=job.lineage,
            )
        except Exception as error:
            self._give_up(load, names, error)
            names = []
        self._next(load, names)

    def _next(self, load: _Load, names: list[str]) -> None:
        """Go on with the first of the tiers left."""
        if load.on_disk is not None:
            load.lent.release()
            load.lent = _Lent(None, lambda: None)
        if names and not self._stop.is_set():
            self._workers[names[0]].submit(lambda: self._keep(load, names))
            return
        self._give_up(load, names, CheckpointError("the engine ended before it came to this tier"))
        load.lent.release()
        self._arrived(load.job.id)
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _arrived(self, id: CheckpointId) -> None:
        with self._idle:
            self._loads[id] -= 1
            if self._loads[id]:
                return
            del self._loads[id]
            due = id in self._drop_later
            self._drop_later.pop(id, None)
        if due and not self._stop.is_set():
            self._workers[_ON_DISK].submit(lambda: self._removals.remove(_ON_DISK, id))

    def _keep(self, load: _Load, names: list[str]) -> None:
        name = names[0]
        job, cpu = load.job, time.thread_time()
        try:
            if self._try(load, name):
                load.tell(
                    Durable(
                        id=job.id,
                        rank=job.rank,
                        tier=name,
                        nbytes=load.record.nbytes if load.record else 0,
                        seconds=time.perf_counter() - load.submitted,
                        cpu_seconds=time.thread_time() - cpu,
                    )
                )
                if name == _ON_DISK:
                    load.on_disk = self.tiers[name]
        except Exception as error:
            self._give_up(load, [name], error)
        self._next(load, names[1:])

    def _give_up(self, load: _Load, names: Sequence[str], error: Exception) -> None:
        """These tiers will not have the shard."""
        job = load.job
        text = str(error) if isinstance(error, SapwoodError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, SapwoodError):
            log.error("checkpoint %s, rank %d, unforeseen:", job.id, job.rank, exc_info=error)
        for name in names:
            load.tell(Failed(id=job.id, rank=job.rank, tier=name, message=text, final=True))

    def _try(self, load: _Load, name: str) -> bool:
        """Put a shard, trying again as often as the tier's settings say."""
        pause = _FIRST_PAUSE
        for left in range(self._specs[name].retries, -1, -1):
            if name in self._gone:
                why = CheckpointError("the tier failed just before, and the engine is about to end")
                self._give_up(load, [name], why)
                return False
            try:
                self._put_with_room(load, name)
                return True
            except SapwoodError as error:
                if self._last_tries.is_set():
                    self._gone.add(name)
                if left == 0 or self._stop.is_set() or self._last_tries.is_set():
                    self._lost(load, name, error)
                    return False
                job, text = load.job, str(error)
                load.tell(Failed(id=job.id, rank=job.rank, tier=name, message=text, final=False))
            self._removals.pause(name, pause)
            pause = min(pause * 2, _LAST_PAUSE)
        return False

    def _put_with_room(self, load: _Load, name: str) -> None:
        """Put a shard; if there is no room, once more without what came to nothing before."""
        tier, id = self.tiers[name], load.job.id
        try:
            self._put(load, tier)
        except NoRoomError:
            if self._removals.reclaim(name, id):
                with suppress(NoRoomError):
                    self._put(load, tier)
                    return
            self._tell(NoRoom(id=id, tier=name))
            raise

    def _lost(self, load: _Load, name: str, error: SapwoodError) -> None:
        """All tries were in vain."""
        if not isinstance(error, NoRoomError):
            self._give_up(load, [name], error)
            return
        id = load.job.id
        if name == _ON_DISK:
            self.drop(id, (name,))  # when nobody reads it there any more
        else:
            self._removals.give_up(name, id)
        advice = "nothing more may be removed there: make room, or keep fewer checkpoints (keep=)"
        self._give_up(load, [name], NoRoomError(f"{error}; {advice}"))

    def _put(self, load: _Load, tier: Tier) -> None:
        assert load.record is not None
        beat()
        faults.point("engine.put", tier=tier.name, step=load.job.id.step, rank=load.job.rank)
        if isinstance(tier, MemoryTier) and load.lent.data is not None:
            load.lent.hold()
            tier.keep(load.record, load.lent.data, load.lent.release)
        else:
            tier.put(load.record, self._data(load))

    def _data(self, load: _Load) -> Any:
        if load.lent.data is not None:
            return load.lent.data
        assert load.on_disk is not None
        assert load.record is not None
        memory = np.zeros(load.record.nbytes, np.uint8)
        with closing(load.on_disk.open(Stored(load.job.id, load.job.rank))) as shard:
            if shard.record.ranges != load.record.ranges:
                raise CheckpointError(
                    f"another shard {load.job.rank} of {load.job.id} than was put there lies in "
                    f"tier {load.on_disk.name}, from where it was to go on"
                )
            for part in shard.record.ranges:
                read_range(shard, part, memory[part.at : part.at + part.nbytes])
        return memory

    def _mend(self, tier: Mendable, id: CheckpointId) -> None:
        try:
            count = tier.mend(id, [t for name, t in self.tiers.items() if name != tier.name])
            if count:
                log.info("tier %s: %d lost parts of %s were written anew", tier.name, count, id)
        except Exception as error:
            known = isinstance(error, SapwoodError)
            told = None if known else error
            log.warning("tier %s: %s was not mended: %s", tier.name, id, error, exc_info=told)
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
