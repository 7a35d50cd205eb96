"""Processes as Linux shows them: who descends from whom, and how to end them all."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process: its parent, its session, and its state (``T`` stopped, ``Z`` ended)."""

    pid: int
    parent: int
    session: int
    state: str

    @property
    def command(self) -> str:
        """Its command line, or an empty string if it is gone."""
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return ""
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def process(pid: int) -> Process | None:
    """What is known about ``pid``; None when there is no such process."""
    # Not pathlib: the suite looks at every process of the machine several times per test.
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(file, 4096)
    except OSError:  # it ended in between
        return None
    finally:
        os.close(file)
    # The command in brackets may itself hold spaces and brackets, so fields are counted after it.
    state, parent, _, session, _ = text[text.rindex(b")") + 2 :].split(maxsplit=4)
    return Process(pid, int(parent), int(session), state.decode())


def processes() -> list[Process]:
    """Every process this one can see."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [found for pid in pids if (found := process(pid)) is not None]


def descendants(root: int) -> list[Process]:
    """The children of ``root``, their children, and so on; nearest first."""
    return descending(root, processes())


def descending(root: int, among: Iterable[Process]) -> list[Process]:
    """Those of ``among`` that descend from ``root``; nearest first."""
    children: dict[int, list[Process]] = {}
    for found in among:
        children.setdefault(found.parent, []).append(found)
    result: list[Process] = []
    generation = [root]
    while generation:
        born = [child for pid in generation for child in children.get(pid, [])]
        result += born
        generation = [child.pid for child in born]
    return result


def in_session(session: int, among: Iterable[Process]) -> list[Process]:
    """The living processes of one session, of those in ``among``."""
    return [found for found in among if found.session == session and found.state != "Z"]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each; those already gone are no error."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent ends, even while it is stopped."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none can get out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
