"""Hearing of signals that ask a process to stop.

One handler per process serves every run in it. It only takes a note: what must happen happens where
the training is ready for it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Listening", "listen"]

log = logging.getLogger(__name__)
# A batch system may signal every process of a job, and a launcher among them passes it on: both
# arrive within moments, and are one request.
_SAME = 2.0

Heard = Callable[[str], None]

_listeners: tuple[Listening, ...] = ()
_before: dict[int, Any] = {}
_first: dict[int, float] = {}
_owner = 0


class Listening:
    """One listener; ``close`` ends it, and with the last one the handlers go."""

    def __init__(self, numbers: tuple[int, ...], heard: Heard) -> None:
        """Use ``listen``."""
        self.numbers = numbers
        self.heard = heard
        self.deaf = False
        """Signals that come now do nothing: the stop is done, the process is about to end."""
        self.hopeless = False
        """No stop is possible any more: the next signal takes its usual effect."""

    def close(self) -> None:
        """Hear nothing more."""
        global _listeners
        _listeners = tuple(one for one in _listeners if one is not self)
        for number in self.numbers:
            if not any(number in one.numbers for one in _listeners):
                _restore(number)


def listen(signals: Sequence[signal.Signals], heard: Heard) -> Listening:
    """Call ``heard`` with the signal's name when one of ``signals`` arrives.

    A Python handler that was there before is called too. A second signal of the same kind takes
    its default effect: it ends the process.
    """
    global _listeners, _owner
    if threading.current_thread() is not threading.main_thread():
        names = ", ".join(one.name for one in signals)
        if signals:
            log.warning(
                "this Run is not made in the main thread, so %s cannot stop it: make it there, or "
                "set stop_signals=None; a time limit and other ranks still can",
                names,
            )
        return Listening((), heard)
    taken = tuple(int(number) for number in signals if _take(number))
    listening = Listening(taken, heard)
    if not _owner:
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)
    _owner = os.getpid()
    _listeners = (*_listeners, listening)
    return listening


def _take(number: signal.Signals) -> bool:
    """Install the handler, unless somebody has other plans with this signal."""
    there = signal.getsignal(number)
    if there is _handle:
        return True
    if there is signal.SIG_IGN:
        log.warning("%s is ignored in this process, and stays so: it stops no run", number.name)
        return False
    if there in (signal.SIG_DFL, None) and _caught(number):
        # Python cannot put it back (faulthandler, MPI and other C libraries).
        log.warning(
            "%s has a handler that is not Python's (faulthandler's, MPI's) and keeps it: it stops "
            "no run; name another signal in stop_signals=",
            number.name,
        )
        return False
    _before[number] = there
    _first.pop(number, None)
    signal.signal(number, _handle)
    return True


def _caught(number: signal.Signals) -> bool:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _restore(number: int) -> None:
    _first.pop(number, None)
    # Elsewhere than in the main thread it cannot be done; with nobody listening, the handler does
    # what would have been done without it. Whoever hooked after us still needs ours.
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(number) is _handle:
        signal.signal(number, _before.pop(number))


def _handle(number: int, frame: FrameType | None) -> None:
    """Runs between any two instructions of the main thread: no locks, no logging, no I/O."""
    mine = [one for one in _listeners if number in one.numbers] if os.getpid() == _owner else []
    if not mine:
        _usual(number, frame)
        return
    if all(one.deaf for one in mine):
        return
    now = time.monotonic()
    again = now - _first.setdefault(number, now) > _SAME
    if again or any(one.hopeless for one in mine):
        _end(number)
        return
    for one in mine:
        one.heard(signal.Signals(number).name)
    before = _before.get(number)
    if callable(before):
        before(number, frame)


# -- forks of this process, such as workers of a data loader: they end as without us ---------------

_held = threading.local()


def _hold() -> None:
    """Python drops what it heard while it forked, so that has to wait in the system."""
    numbers = {number for one in _listeners for number in one.numbers}
    _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


def _forget() -> None:
    """In the child: the handlers go, then what waited may come."""
    global _listeners
    _listeners = ()
    for number in list(_before):
        _restore(number)
    _let_go()


def _usual(number: int, frame: FrameType | None) -> None:
    """A child of ours, or nobody listens: as if this handler were not there."""
    before = _before.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        _end(number)


def _end(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
