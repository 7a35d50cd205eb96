"""One rank, as its node's engine sees it: the arenas it lent and the shards it handed over.

A rank that is gone leaves its shards behind: its arenas are unmapped as soon as no tier needs them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.base import Durable, Failed, Freed, Job, Progress
from sapwood.checkpoint.engine.messages import from_progress
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.wire import Wire, WireError
from sapwood.state.shards import ShardPlan
from sapwood.tiers.base import Stored

__all__ = ["Session"]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lent:
    """An arena, and the shard in it while some tier needs it."""

    arena: Arena
    shard: Stored | None = None
    recalled: bool = False


class Session:
    """What the engine holds for one rank, from its first hello to its end, or its work's end."""

    def __init__(self, name: str, group: str, pipeline: Pipeline) -> None:
        """``name`` is drawn by the rank: by it, it is known again when a connection broke."""
        self.name = name
        self.group = group
        self.pipeline = pipeline
        self.attempt = -1
        self.plans: dict[int, ShardPlan] = {}
        self._wire: Wire | None = None
        self._lent: dict[int, _Lent] = {}
        self._open: dict[Stored, set[str]] = {}
        self._lock = threading.RLock()

    # -- coming and going --------------------------------------------------------------------

    def attach(self, wire: Wire, attempt: int) -> bool:
        """The rank is here; False if a later connection of the same rank is here already."""
        with self._lock:
            if attempt <= self.attempt:
                return False
            old, self._wire, self.attempt = self._wire, wire, attempt
        if old is not None:
            old.shut()
        return True

    def detach(self, wire: Wire) -> bool:
        """The connection ended; True if it was the rank's last one."""
        with self._lock:
            if self._wire is not wire:
                return False
            self._wire = None
            for number, lent in list(self._lent.items()):
                self._forget(number, lent)
        return True

    @property
    def attached(self) -> bool:
        """Whether the rank is connected."""
        return self._wire is not None

    @property
    def alive(self) -> bool:
        """Whether the rank is connected, and not only a child that has inherited its socket."""
        pid = self.pid
        return self.attached and (pid == 0 or _lives(pid))

    @property
    def pid(self) -> int:
        """The rank's process; 0 if it is out of sight, or not connected."""
        wire = self._wire
        with suppress(OSError):
            return 0 if wire is None else wire.peer[0]
        return 0

    @property
    def idle(self) -> bool:
        """Whether nothing of it is needed any more, once the rank is gone."""
        with self._lock:
            return not self._lent and not self._open

    def state(self) -> tuple[list[int], list[list[int | str]]]:
        """Arenas and shards still in use: what a rank that connects again must know."""
        with self._lock:
            busy = [number for number, lent in self._lent.items() if lent.shard is not None]
            return busy, [[s.id.step, s.id.attempt, s.rank] for s in self._open]

    @contextmanager
    def order_from(self, wire: Wire) -> Iterator[None]:
        """Do something for the rank, unless it has connected again meanwhile.

        It was then told what is in use, and may have filled an arena anew that an order still on
        its way in the old connection speaks of.

        Raises:
            WireError: this is not the rank's newest connection.
        """
        with self._lock:
            if self._wire is not wire:
                raise WireError("this rank has connected again")
            yield

    # -- what the rank asks for --------------------------------------------------------------

    def lend(self, number: int, arena: Arena) -> None:
        """Read shards from this arena."""
        with self._lock:
            old = self._lent.get(number)
            if old is not None and old.shard is not None:
                raise ValueError(f"arena {number} is still in use")
            self._lent[number] = _Lent(arena)
        if old is not None:
            old.arena.close()

    def recall(self, number: int) -> None:
        """Forget an arena, when it is free."""
        with self._lock:
            lent = self._lent.get(number)
            if lent is not None:
                lent.recalled = True
                self._forget(number, lent)

    def submit(self, job: Job) -> None:
        """Carry a shard on."""
        shard = Stored(job.id, job.rank)
        with self._lock:
            lent = self._lent[job.arena]
            nbytes = job.nbytes
            if lent.shard is None and lent.arena.nbytes < nbytes:
                # It has grown since it was lent: what is saved beside tensors has no fixed size.
                old, lent.arena = lent.arena, lent.arena.mapped_anew()
                old.close()
            if lent.shard is not None or lent.arena.nbytes < nbytes:
                raise ValueError(f"arena {job.arena} is in use, or smaller than {nbytes} bytes")
            lent.shard = shard
            # Not those of other settings: nobody would ever report on them.
            tiers = self._open.get(shard, set()) | (set(job.tiers) & self.pipeline.tiers.keys())
            if tiers:  # the same shard may be on its way to other tiers already
                self._open[shard] = tiers
        given_back: Callable[[], None] = lambda: self._given_back(job.arena, lent)  # noqa: E731
        # No memory has zero bytes, but a shard may.
        self.pipeline.submit(job, lent.arena.bytes[:nbytes], given_back, self.tell)

    def arena_of(self, shard: Stored) -> Arena | None:
        """The arena a shard is in, if it is in one of this rank's."""
        with self._lock:
            return next((x.arena for x in self._lent.values() if x.shard == shard), None)

    # -- what it hears -----------------------------------------------------------------------

    def tell(self, progress: Progress) -> None:
        """Report to the rank, if it is there; called on the pipeline's threads."""
        if isinstance(progress, (Durable, Failed)) and getattr(progress, "final", True):
            if isinstance(progress, Failed):
                log.error("%s, tier %s: %s", progress.id, progress.tier, progress.message)
            shard = Stored(progress.id, progress.rank)
            with self._lock:
                left = self._open.get(shard, set())
                left.discard(progress.tier)
                if not left:
                    self._open.pop(shard, None)
        wire = self._wire
        if wire is not None:
            try:
                wire.send(from_progress(progress))
            except WireError as error:
                log.warning("rank of session %s: %s", self.name, error)
                wire.shut()  # its reader notices

    def _given_back(self, number: int, lent: _Lent) -> None:
        with self._lock:
            lent.shard = None
            self._forget(number, lent)
        self.tell(Freed(arena=number))

    def _forget(self, number: int, lent: _Lent) -> None:
        if lent.shard is None and (lent.recalled or self._wire is None):
            if self._lent.get(number) is lent:
                del self._lent[number]
            lent.arena.close()


def _lives(pid: int) -> bool:
    """Whether a process is there, and not merely waiting for its parent to notice its death."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
