"""The ``node`` engine as a rank sees it: a process that takes shards over and outlives the rank.

Nothing here stops a training: an engine that died is started again at the next checkpoint, and what
it had not finished is reported as failed. One that merely does not answer keeps the arenas it was
given, as it may still read them; the rank goes on without them and looks for it again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.base import Failed, Freed, Job, Listener, NoRoom, Progress
from sapwood.checkpoint.engine.link import Link
from sapwood.checkpoint.engine.messages import from_job, from_plan, to_id, to_progress
from sapwood.checkpoint.engine.reach import Reach
from sapwood.checkpoint.engine.remote import RemoteMemory
from sapwood.checkpoint.engine.wire import WireError
from sapwood.errors import CheckpointError
from sapwood.runtime import faults
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId

__all__ = ["NodeEngine"]

log = logging.getLogger(__name__)
_COURTESY, _COURTESY_LATER = 3.0, 0.5
_ANSWER = 10.0
_FIRST_SEARCH, _SEARCH_EVERY = 0.2, 2.0
_END = 20.0


class NodeEngine:
    """A rank's side of its node's engine. Fulfils ``Engine``."""

    def __init__(self, reach: Reach, config: Mapping[str, Any], listener: Listener) -> None:
        """Connect, starting the engine if there is none.

        Raises:
            CheckpointError: it cannot be reached.
        """
        self._reach = reach
        self._hello = {"session": secrets.token_hex(8), "config": config}
        self._tiers = {spec["kind"] for spec in config["specs"]}
        self._listener = listener
        self._numbers, self._attempts = count(), count()
        self._arenas: dict[int, Arena] = {}
        self._busy: dict[int, Link] = {}
        self._open: dict[Stored, tuple[Link, set[str]]] = {}
        self._telling = 0
        self._state = threading.Condition()
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._closed = threading.Event()
        self._last = False  # of those the engine ends with
        self._connect(courtesy=_COURTESY)

    @property
    def pid(self) -> int | None:
        """The engine's process id, while it is connected."""
        link = self._link
        return None if link is None else link.pid

    # -- the contract ------------------------------------------------------------------------

    def lend(self, arena: Arena) -> int:
        """Give the engine the arena's descriptor."""
        number = next(self._numbers)
        with self._state:
            self._arenas[number] = arena
        self._order({"op": "lend", "arena": number}, arena)
        return number

    def recall(self, arena: int) -> None:
        """Have the engine unmap it."""
        with self._state:
            known = self._arenas.pop(arena, None)
        if known is not None:
            self._order({"op": "recall", "arena": arena})

    def submit(self, job: Job) -> None:
        """Hand over a shard; whatever goes wrong is reported, not raised."""
        shard, tiers = Stored(job.id, job.rank), self._tiers.intersection(job.tiers)
        try:
            link = self._link or self._connect(courtesy=_COURTESY_LATER)
        except CheckpointError as error:
            self._failed(shard, tiers, f"there is no engine to take it: {error}")
            self._listen(Freed(arena=job.arena))
            return
        with self._state:
            self._busy[job.arena] = link
            if tiers:
                # The same shard may be on its way to other tiers already.
                self._open[shard] = (link, tiers | self._open.get(shard, (link, set()))[1])
        try:
            link.wire.send(from_job(job, self._send_plan(link, job)))
        except CheckpointError as error:
            link.wire.shut()  # its reader tells of whatever else is under way
            # The engine has not got all of the message, so it will not read the arena.
            self._settle([job.arena], [shard], f"the engine did not take it: {error}")

    def drop(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """Remove a checkpoint; if no engine is there to do it, it stays."""
        self._order({"op": "drop", "id": [id.step, id.attempt], "tiers": tiers})

    def mend(self, id: CheckpointId) -> None:
        """Give nodes back what they have lost of a checkpoint, if an engine is there to do it."""
        self._order({"op": "mend", "id": [id.step, id.attempt]})

    def drain(self, timeout: float) -> bool:
        """Wait for this rank's own shards."""
        with self._state:
            return self._state.wait_for(lambda: not self._open and not self._telling, timeout)

    def close(self, timeout: float) -> None:
        """Wait for this rank's shards, say goodbye, and see the engine off if it ends now."""
        if self._closed.is_set():
            return
        drained = self.drain(timeout)
        if not drained:
            log.warning("checkpoints were under way after %g s; the engine goes on alone", timeout)
        self._closed.set()
        with self._connecting:
            link, self._link = self._link, None
        if link is None:
            return
        try:
            link.wire.send({"op": "goodbye"})
            link.finished.wait(_END)
            # One that still has work ends when it is done, and nobody waits for that any more.
            if self._last and drained and not link.dead(_END):
                log.warning("checkpoint engine %d has not ended yet", link.pid)
        except WireError as error:
            log.warning("the checkpoint engine is already gone: %s", error)
        link.close()
        link.release()

    # -- beyond the contract: what a restoring rank asks for ------------------------------------

    def settle(self, timeout: float) -> bool:
        """Wait until the engine has nothing on its way, of earlier groups neither."""
        deadline = time.monotonic() + timeout
        link = self._link
        while link is not None:
            try:
                answer, _ = link.ask("drain", _ANSWER)
            except WireError as error:
                log.warning("cannot wait for the checkpoint engine: %s", error)
                return False
            if answer["done"]:
                return True
            if time.monotonic() > deadline:
                break
        return False

    def memory(self) -> RemoteMemory:
        """The shards in the engine's memory."""
        return RemoteMemory(lambda: self._link, timeout=_ANSWER)

    # -- the connection ----------------------------------------------------------------------

    def _connect(self, *, courtesy: float) -> Link:
        with self._connecting:
            if self._link is None:
                if self._closed.is_set():
                    raise CheckpointError("this rank's engine is closed")
                hello = {**self._hello, "attempt": next(self._attempts)}
                self._welcomed(self._reach.find_or_start(hello, courtesy=courtesy))
            assert self._link is not None
            return self._link

    def _welcomed(self, link: Link) -> None:
        """Bring both sides to the same state; an engine that is new knows nothing of ours."""
        welcome = link.welcome
        busy = set(welcome["busy"])
        under_way = {Stored(to_id(row[:2]), row[2]) for row in welcome["open"]}
        with self._state:
            freed = [number for number in self._busy if number not in busy]
            gone = [shard for shard in self._open if shard not in under_way]
            lent = [(n, a) for n, a in self._arenas.items() if n not in busy]
        try:
            for number, arena in lent:
                link.wire.send({"op": "lend", "arena": number}, [arena.fd])
        except BaseException:
            link.close()
            link.release()
            raise
        with self._state:
            # Not before all was said: of what is this link's, its own end must tell.
            self._busy.update(dict.fromkeys(self._busy.keys() & busy, link))
            for shard in self._open.keys() & under_way:
                self._open[shard] = (link, self._open[shard][1])
        self._link = link
        link.start(self._heard, self._lost)
        self._settle(freed, gone, "the engine that had it was lost; it may be there nevertheless")

    def _order(self, message: Mapping[str, Any], arena: Arena | None = None) -> None:
        """Send what a new engine would be told anyway, or need not know."""
        link = self._link
        if link is None:
            return
        try:
            link.wire.send(message, () if arena is None else (arena.fd,))
        except WireError:
            link.wire.shut()

    def _send_plan(self, link: Link, job: Job) -> int:
        """The number by which the engine knows the job's plan; it is sent once, and large."""
        faults.point("engine.submit", step=job.id.step)
        if link.plan is not job.plan:
            link.plan_number += 1
            link.wire.send(from_plan(link.plan_number, job.plan, job.rank))
            link.plan = job.plan
        return link.plan_number

    # -- on the thread that reads ------------------------------------------------------------

    def _heard(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "farewell":
            self._last = bool(message["ends"])
            return
        progress = to_progress(message)
        if progress is not None:
            self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        with self._state:
            if isinstance(progress, Freed) and self._busy.pop(progress.arena, None) is None:
                return
        self._listen(progress)
        if isinstance(progress, (Freed, NoRoom)) or not getattr(progress, "final", True):
            return
        shard = Stored(progress.id, progress.rank)
        with self._state:
            _, left = self._open.get(shard, (None, set()))
            left.discard(progress.tier)
            if not left:
                self._open.pop(shard, None)
            self._state.notify_all()

    def _listen(self, progress: Progress) -> None:
        try:
            self._listener(progress)
        except Exception:
            log.exception("while hearing of %s", progress)

    def _failed(self, shard: Stored, tiers: Iterable[str], why: str) -> None:
        for name in sorted(tiers):
            self._listen(Failed(id=shard.id, rank=shard.rank, tier=name, message=why, final=True))

    def _settle(self, arenas: Iterable[int], shards: Iterable[Stored], why: str) -> None:
        """Nobody will report on these any more; each is told once, whoever comes to it first."""
        with self._state:
            freed = [n for n in arenas if n in self._busy]
            left = [(s, self._open.pop(s)[1]) for s in shards if s in self._open]
            for number in freed:
                del self._busy[number]
            self._telling += 1
        for shard, tiers in left:
            self._failed(shard, tiers, why)
        for number in freed:
            self._listen(Freed(arena=number))
        with self._state:
            self._telling -= 1
            self._state.notify_all()

    def _lost(self, link: Link, reason: str) -> None:
        with self._state:
            if self._link is link:
                self._link = None
        if self._closed.is_set():
            return
        log.warning("lost the checkpoint engine of this node, process %d: %s", link.pid, reason)
        pause = _FIRST_SEARCH
        while not link.dead(pause):
            # It lives and may still read what it was given.
            if self._closed.is_set() or self._find_again():
                break
            pause = min(2 * pause, _SEARCH_EVERY)
        else:
            with self._state:
                arenas = [n for n, held in self._busy.items() if held is link]
                shards = [s for s, (held, _) in self._open.items() if held is link]
            self._settle(arenas, shards, "the engine died before it was done with it")
        link.release()

    def _find_again(self) -> bool:
        with self._connecting:
            if self._link is None:
                try:
                    link = self._reach.find({**self._hello, "attempt": next(self._attempts)})
                    if link is not None:
                        self._welcomed(link)
                except CheckpointError as error:
                    log.info("looking for the checkpoint engine: %s", error)
            return self._link is not None
