"""Ending what we started: death signals, adoption of orphans, and the walk over descendants."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "descendants",
    "die_with_parent",
    "end_descendants",
    "ending_in_order",
    "kill_descendants",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE = 10.0
# It outlives the ranks on purpose, with checkpoints they can no longer save, and ends by itself.
_DETACHED = b"\0-m\0sapwood.checkpoint.engine\0"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies.

    ``parent`` is the process that started this one; if it is already gone, we leave at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"sapwood: the launcher (process {parent}) is gone, so this rank does not start")


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM clear up as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none is lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(grace: float) -> None:
    """End every process below this one: SIGTERM, ``grace`` seconds, then SIGKILL.

    Spared are checkpoint engines: what they were given must not be lost.
    """
    _signal_all(_ours(), signal.SIGTERM)
    _reap_until(time.monotonic() + grace)
    deadline = time.monotonic() + _KILL_DEADLINE
    # A process may start another one while we look, so look again until there is none.
    while (left := _ours()) and time.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        _reap_until(time.monotonic() + 0.2)


def kill_descendants() -> None:
    """Kill every process below this one, but for checkpoint engines; reaping is left to others."""
    _signal_all(_ours(), signal.SIGKILL)


def descendants(root: int) -> set[int]:
    """Process ids of everything below ``root``; zombies too, until they are reaped."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo.extend(below)
    return found


def _ours() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if not _detached(pid)}


def _detached(pid: int) -> bool:
    with suppress(OSError):
        return _DETACHED in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _parents() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The command in parentheses may hold spaces and parentheses of its own.
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), int(after[1])


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap_until(deadline: float) -> None:
    while _ours():
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() >= deadline:
            return
        time.sleep(0.02)


def _prctl(option: int, value: int) -> None:
    # Linux only; elsewhere the ordinary ways of ending (signals, launcher) have to do.
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
