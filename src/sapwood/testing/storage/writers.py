"""Checks with writers in processes of their own: they race, and they are killed."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

from sapwood.errors import AlreadyThere, NotFound
from sapwood.storage.base import Keeper, Wanted
from sapwood.testing import ranks
from sapwood.testing.storage.common import Opener, content, expect, keys_in, opened

__all__ = ["check_killed_writer", "check_no_leftovers", "check_racing_writers"]


def check_racing_writers(
    opener: Opener, *, writers: int = 3, rounds: int = 5, nbytes: int = 1000, timeout: float = 60.0
) -> None:
    """Of processes that publish under one key in the same moment, exactly one is told it was first.

    Its bytes are there, and those of others were never seen.
    """
    won = ranks.spawn(_race, writers, opener, rounds, nbytes, timeout=timeout)
    with opened(opener) as keeper:
        for turn in range(rounds):
            first = [me for me in range(writers) if won[me][turn]]
            assert len(first) == 1, f"round {turn}: {first} were all told that they were first"
            there = keeper.get(f"race/{turn}/key", limit=2**30)
            assert there == content(first[0], nbytes), f"round {turn}: not the winner's bytes"


def _race(opener: Opener, rounds: int, nbytes: int) -> list[bool]:
    me, mine = ranks.rank(), content(ranks.rank(), nbytes)
    won = []
    with opened(opener) as keeper:
        for turn in range(rounds):
            with keeper.begin(f"race/{turn}/key", nbytes) as draft:
                draft.write(mine)
                _meet(keeper, f"race/{turn}/at", me)
                try:
                    draft.publish()
                    won.append(True)
                except AlreadyThere:
                    won.append(False)
            assert len(keeper.get(f"race/{turn}/key", limit=2**30)) == nbytes
    return won


def _meet(keeper: Keeper, folder: str, me: int) -> None:
    """Wait for all others, by means of the keeper itself."""
    keeper.put(f"{folder}/{me}", [b""])
    deadline = time.monotonic() + 30.0
    while len(keys_in(keeper, folder)) < ranks.world():
        assert time.monotonic() < deadline, "not all writers came"


def check_killed_writer(opener: Opener, *, nbytes: int = 100_000, timeout: float = 30.0) -> None:
    """A writer killed in mid-draft leaves nothing to be seen, and ``sweep`` clears up after it.

    It does nothing to the draft of a living one.
    """
    with ranks.start(_stall, 1, opener, nbytes) as group:
        group.wait_mark("under way", 0, timeout)
        with opened(opener) as keeper:
            assert keys_in(keeper, "kill") == []
            with keeper.begin("kill/alive") as draft:
                draft.write(content(2, nbytes))
                keeper.sweep()
                draft.write(b"more")
                draft.publish()
            assert keeper.size("kill/alive") == nbytes + 4
            group.kill(0, signal.SIGKILL)
            group.wait(timeout)
            assert keeper.sweep(quiet=-60.0) == 1
            assert keeper.sweep(quiet=-60.0) == 0
            assert keys_in(keeper, "kill") == ["kill/alive"]
            with expect(NotFound, "reading what a killed writer began"):
                keeper.get("kill/dead")
            keeper.put("kill/dead", [b"now"])


def _stall(opener: Opener, nbytes: int) -> None:
    keeper = opener()
    draft = keeper.begin("kill/dead")
    draft.write(content(1, nbytes))
    ranks.mark("under way")
    time.sleep(600)


def check_no_leftovers(opener: Opener) -> None:
    """A keeper that was closed has no threads and no descriptors, whatever was left open."""
    _use(opener)
    before = _owned()
    for _ in range(3):
        _use(opener)
    deadline = time.monotonic() + 5.0
    while _more(left := _owned(), before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert not _more(left, before), f"before and after (threads, descriptors): {before}, {left}"


def _use(opener: Opener) -> None:
    keeper = opener()
    keeper.put("left/a", [content(1, 100_000)], replace=True)
    keeper.ask([Wanted("left/a", 0, bytearray(1000))])
    open_draft = keeper.begin("left/b")
    open_draft.write(content(1, 100_000))
    sealed = keeper.begin("left/c", replace=True)
    sealed.write(b"x")
    sealed.seal()
    list(keeper.list())
    keeper.close()
    keeper.close()


def _more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return any(one > other for one, other in zip(now, before, strict=True))


def _owned() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
