"""How long ranks that were asked to end may take.

Torch's launcher waits a fixed time, chosen before the ranks start. A run that saves first needs
more than a script that just ends, and says how much in its note.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from sapwood.cli import process
from sapwood.runtime.notes import read_notes

__all__ = ["Limit"]

_GRACE = 10.0
_POLL = 0.1


class Limit:
    """A thread that kills what is left of the ranks when their time is over."""

    def __init__(self, notes: Path, grace: float | None) -> None:
        """``grace``: seconds, None: as the notes of the ranks say."""
        self._notes, self._grace = notes, grace
        # A signal handler uses it: putting into this queue never blocks.
        self._orders: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sapwood-limit", daemon=True)
        self._thread.start()

    def begin(self, *, patient: bool) -> None:
        """The ranks were asked to end; ``patient``: in a way that lets them save."""
        self._orders.put(patient)

    def close(self) -> None:
        """The ranks have ended."""
        self._closed.set()
        self._orders.put(None)
        self._thread.join(5.0)

    def _watch(self) -> None:
        patient = self._orders.get()
        if patient is None:
            return
        began, clock = time.monotonic(), time.time()
        while not self._closed.wait(_POLL):
            if time.monotonic() - began > self._seconds(clock, patient=patient):
                process.kill_descendants()

    def _seconds(self, asked: float, *, patient: bool) -> float:
        """From the request, made at ``asked``, to the kill."""
        if self._grace is not None:
            return self._grace
        notes = read_notes(self._notes) if patient else []
        return max([_GRACE, *(_GRACE + _needs(note, asked) for note in notes)])


def _needs(note: dict[str, float], asked: float) -> float:
    """A stop takes the rest of a step, for which nobody can speak, and then ``needs`` at most."""
    if "until" in note:
        return note["until"] - asked
    return 2 * note.get("needs", 0.0)
