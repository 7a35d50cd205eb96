"""A running group of ranks, seen from the process that started it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait as wait_for_any

from sapwood.errors import RankError, UsageError
from sapwood.testing import _proc
from sapwood.testing._member import Member
from sapwood.testing.outcome import Outcome

# How long ranks get to write their stacks, and how long silence means that they have.
_STACKS_TIMEOUT = 3.0
_STACKS_SILENCE = 0.2
# A process started by a rank may need a moment to see that its rank has ended.
_LEFTOVER_GRACE = 2.0


class Group:
    """N ranks that run from the start of a ``with`` block to its end at the latest."""

    def __init__(
        self, world: int, launch: Callable[[int], Member], release: Callable[[], None]
    ) -> None:
        self.world = world
        self._launch = launch
        self._release = release
        self._members: list[Member] = []

    def __enter__(self) -> Group:
        try:
            for number in range(self.world):
                self._members.append(self._launch(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [member.pid for member in self._members]

    def kill(self, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        member = self._members[rank]
        member.refresh()
        if member.outcome is not None:
            raise UsageError(f"kill: {member.outcome.describe()}, so it can get no signal")
        os.kill(member.pid, sig)

    def wait(self, timeout: float, ranks: Iterable[int] | None = None) -> list[Outcome]:
        """Wait for all ranks (or for ``ranks``) to end; what became of each, in rank order.

        Raises:
            RankError: Some had not ended in time. It holds the stacks of their threads; the whole
                group has been killed.
        """
        members = self._members if ranks is None else [self._members[one] for one in sorted(ranks)]
        self._until(lambda: all(one.outcome for one in members), timeout)
        outcomes = [one.outcome for one in members if one.outcome is not None]
        if len(outcomes) < len(members):
            raise self._expired(f"not done after {timeout:g} s")
        return outcomes

    def wait_mark(self, name: str, rank: int, timeout: float = 60.0) -> None:
        """Wait until ``rank`` has come to ``mark(name)``.

        Raises:
            RankError: The rank ended without it, or did not come to it in time.
        """
        member = self._members[rank]
        self._until(lambda: name in member.marks or member.outcome is not None, timeout)
        if name in member.marks:
            return
        if member.outcome is not None:
            raise RankError(f"no mark {name!r}: {member.outcome.describe()}", rank=rank)
        raise self._expired(f"rank {rank} did not come to mark {name!r} in {timeout:g} s")

    def leftovers(self, grace: float = _LEFTOVER_GRACE) -> dict[int, list[str]]:
        """The processes that ranks which have ended left running: rank to ``pid command``."""
        ended = [one for one in self._members if one.outcome is not None]
        deadline = time.monotonic() + grace
        while True:
            everyone = _proc.processes()
            found = {one.rank: _told(_proc.in_session(one.pid, everyone)) for one in ended}
            left = {rank: told for rank, told in found.items() if told}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def left_behind(self) -> RankError | None:
        """The error that tells of ``leftovers``; None if there are none."""
        left = self.leftovers()
        if not left:
            return None
        told = "; ".join(f"rank {rank}: {', '.join(lines)}" for rank, lines in left.items())
        return RankError(f"ranks ended but left processes running: {told}", rank=min(left))

    def close(self) -> None:
        """Kill every rank that still runs, with all it started, and release where they met."""
        members, self._members = self._members, []
        # Found before anyone is killed: an orphan no longer shows whose child it was.
        everyone = _proc.processes()
        doomed = [pid for member in members for pid in member.family(everyone)]
        try:
            _proc.kill(doomed)
        finally:
            for member in members:
                member.close()
            self._release()
            self._launch = _closed

    def _until(self, done: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._refresh()
        while not done() and (left := deadline - time.monotonic()) > 0:
            waitables = [one for member in self._members for one in member.waitables()]
            if not waitables:
                return
            wait_for_any(waitables, left)
            self._refresh()

    def _refresh(self) -> None:
        for member in self._members:
            member.refresh()

    def _expired(self, why: str) -> RankError:
        late = [one for one in self._members if one.outcome is None]
        done = [one.outcome for one in self._members if one.outcome is not None]
        stood = {one.rank: _state(one) for one in late}
        stacks = _collect_stacks(late)
        parts = [f"{why}: {_list(late)}; finished: {_list(done)}"]
        for one in late:
            parts.append(
                f"rank {one.rank}{stood[one.rank]}, all threads:\n{stacks[one.rank] or '(none)'}"
            )
        parts += [one.describe() for one in done if not one.ok]
        rank = late[0].rank if late else None
        self.close()
        return RankError("\n\n".join(parts), rank=rank)


def _collect_stacks(members: Sequence[Member]) -> dict[int, str]:
    stacks = {one.rank: "" for one in members}
    for one in members:
        one.ask_stacks()
    deadline = time.monotonic() + _STACKS_TIMEOUT
    news = time.monotonic()
    while (now := time.monotonic()) < deadline:
        for one in members:
            if text := one.read_stacks():
                stacks[one.rank] += text
                news = now
        silent = now - news > _STACKS_SILENCE
        if silent and all(stacks[one.rank] for one in members if one.started):
            break
        time.sleep(0.01)
    return stacks


def _state(member: Member) -> str:
    if member.stopped():
        return " (stopped by a signal)"
    if member.returned():
        return " (its function returned, but a thread keeps the process alive)"
    return "" if member.started else " (its process had not started yet)"


def _list(ranks: Sequence[Member | Outcome]) -> str:
    return ", ".join(f"rank {one.rank}" for one in ranks) or "none"


def _told(found: Sequence[_proc.Process]) -> list[str]:
    return [f"{one.pid} {one.command}" for one in found]


def _closed(rank: int) -> Member:
    raise UsageError(f"the group is closed: rank {rank} cannot be started again")
