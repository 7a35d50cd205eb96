"""The parent's view of one rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sapwood.testing import _proc
from sapwood.testing._rank import HEADER
from sapwood.testing.outcome import Outcome

_END_GRACE = 5.0


class Member:
    """One rank: its process, what it has reported, and in the end its outcome."""

    def __init__(
        self, rank: int, process: BaseProcess, reports: Connection, stacks: Connection
    ) -> None:
        self.rank = rank
        self.process = process
        self.pid = process.pid or 0
        self.marks: set[str] = set()
        self.started = False
        self.outcome: Outcome | None = None
        self._reports: Connection | None = reports
        self._stacks = stacks
        self._buffer = bytearray()
        self._report: Outcome | None = None
        # Never blocking: a rank stopped in the middle of a message must not stop the parent.
        os.set_blocking(reports.fileno(), False)
        os.set_blocking(stacks.fileno(), False)

    def waitables(self) -> list[Any]:
        """What to wait on for news of this rank."""
        if self.outcome is not None:
            return []
        return [self.process.sentinel, *([self._reports] if self._reports is not None else [])]

    def refresh(self) -> None:
        """Take in what the rank has said, and whether it has ended."""
        if self.outcome is not None:
            return
        ended = self.process.exitcode
        self._absorb()
        if ended is not None:
            self.outcome = self._conclude(ended)

    def returned(self) -> bool:
        """Whether the rank's function has returned, though its process may still run."""
        return self._report is not None

    def stopped(self) -> bool:
        """Whether the rank stands still by a signal."""
        found = _proc.process(self.pid)
        return found is not None and found.state in "Tt"

    def ask_stacks(self) -> None:
        """Have the rank write the stacks of all its threads, also if it is stopped."""
        if self.started and self.outcome is None:
            os.kill(self.pid, signal.SIGUSR2)
            os.kill(self.pid, signal.SIGCONT)

    def read_stacks(self) -> str:
        """The stacks written since the last time."""
        data, _ = _read_all(self._stacks)
        return data.decode(errors="replace")

    def family(self, everyone: Sequence[_proc.Process]) -> set[int]:
        """The rank and every process it started, of ``everyone`` who runs."""
        family = {found.pid for found in _proc.in_session(self.pid, everyone)}
        if self.process.exitcode is None:
            family |= {self.pid, *(found.pid for found in _proc.descending(self.pid, everyone))}
        return family

    def close(self) -> None:
        """Release everything held for the rank; its family has been killed."""
        self.process.join(_END_GRACE)
        self.refresh()
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        self._stacks.close()
        self.process.close()

    def _absorb(self) -> None:
        if self._reports is None:
            return
        data, ended = _read_all(self._reports)
        self._buffer += data
        if ended:
            self._reports.close()
            self._reports = None
        for body in _frames(self._buffer):
            self._note(*pickle.loads(body))  # noqa: S301 - written by our own rank

    def _note(self, kind: str, when: float, facts: tuple[Any, ...]) -> None:
        if kind == "started":
            self.started = True
        elif kind == "mark":
            self.marks.add(facts[0])
        elif kind == "returned":
            self._report = Outcome(rank=self.rank, value=facts[0], ended=when)
        elif kind == "raised":
            name, text = facts
            self._report = Outcome(rank=self.rank, error=text, error_type=name, ended=when)

    def _conclude(self, exit_code: int) -> Outcome:
        raised = self._report is not None and self._report.error is not None
        if self._report is not None and (raised or exit_code == 0):
            return self._report
        now = time.monotonic()
        if exit_code < 0:
            number = signal.Signals(-exit_code)
            return Outcome(rank=self.rank, signal=number, stacks=self.read_stacks(), ended=now)
        return Outcome(rank=self.rank, exit_code=exit_code, ended=now)


def _read_all(connection: Connection) -> tuple[bytes, bool]:
    """What can be read without waiting, and whether the other end is closed."""
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(connection.fileno(), 1 << 20)
        except BlockingIOError:
            return b"".join(chunks), False
        if not chunk:
            return b"".join(chunks), True
        chunks.append(chunk)


def _frames(buffer: bytearray) -> list[bytes]:
    """Cut the complete messages off the front of ``buffer``."""
    frames: list[bytes] = []
    while len(buffer) >= HEADER.size:
        (length,) = HEADER.unpack_from(buffer)
        if len(buffer) < HEADER.size + length:
            break
        frames.append(bytes(buffer[HEADER.size : HEADER.size + length]))
        del buffer[: HEADER.size + length]
    return frames
