"""What a reader and its copies in the workers of a DataLoader know of each other.

A DataLoader gives each worker a copy of the reader: forked with the process, or pickled. What the
reader does later, the copies do not see; and how far they got, it does not see. A little shared
memory carries two things between them. The position the reader was set to last, so that workers
that persist follow ``set_epoch``. And the loops that workers have begun, so that each loop over the
DataLoader is the next epoch, for new and for persistent workers, and so that the reader knows that
its own position is no longer the training's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from sapwood.buffers.arena import Arena
from sapwood.data.position import Position
from sapwood.errors import DeadlineError, UsageError

__all__ = ["Copy", "Refused", "Seat", "SharedPosition"]

_log = logging.getLogger(__name__)

_NONE = -1
_LOOPS = 16
"""So many loops are remembered: workers of one loop do not begin it at the same time."""
_WORKERS = 1024
_LOOP = np.dtype(
    [
        ("seed", "<i8"),
        ("loop", "<i8"),
        ("workers", "<i8"),
        ("serial", "<i8"),
        ("epoch", "<i8"),
        ("batch", "<i8"),
        ("until", "<i8"),
        ("ended", "<i8"),
        ("refused", "?"),
        ("joined", "?", (_WORKERS,)),
    ]
)
_PAGE = np.dtype(
    [
        ("owner", "<i8"),
        ("serial", "<i8"),
        ("epoch", "<i8"),
        ("batch", "<i8"),
        ("until", "<i8"),
        ("begun", "<i8"),
        ("told", "<i8"),
        ("loops", _LOOP, (_LOOPS,)),
    ]
)
_PATIENCE, _PAUSE = 30.0, 0.001


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One worker in one loop over a DataLoader."""

    seed: int
    """What the DataLoader has drawn for all of its workers; another one mostly has another."""
    loop: int
    """How many loops this copy of the reader was in before."""
    worker: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What a worker's copy of the reader knows by itself."""

    position: Position
    serial: int
    """As of which position of the reader it was copied."""
    loaded: bool
    """Whether it was told its position in the worker, by ``load_state_dict`` or ``set_epoch``."""
    last: Position | None
    """Where it was in the loop before."""


class SharedPosition:
    """The position of a reader, in memory that it shares with its copies in workers.

    The process of the reader owns it; it ends with the last copy. Every change is made under a lock
    of the file, which ends with the process that holds it.
    """

    def __init__(self, position: Position) -> None:
        """Owned by this process; no worker has begun a loop."""
        self._take(Arena(_PAGE.itemsize, label="reader-position"))
        self._page["owner"][0] = os.getpid()
        self.set(position)

    def _take(self, arena: Arena) -> None:
        self._arena = arena
        self._page: Any = arena.bytes.view(_PAGE)
        self._loops: Any = self._page["loops"][0]

    @classmethod
    def attach(cls, fd: int) -> SharedPosition:
        """Map what another process has made; the descriptor is this object's from now on."""
        self = cls.__new__(cls)
        self._take(Arena.attach(fd))
        return self

    def copied(self) -> SharedPosition:
        """The same, owned by this process: it has inherited this, is no worker, and reads on."""
        made = SharedPosition(Position())
        with self._locked():
            made._arena.bytes[:] = self._arena.bytes
        made._page["owner"][0] = os.getpid()
        return made

    @property
    def fd(self) -> int:
        """The descriptor, for a process that is being started."""
        return self._arena.fd

    @property
    def owner(self) -> int:
        """The process of the reader."""
        return int(self._page["owner"][0])

    @property
    def serial(self) -> int:
        """How often the position was set."""
        return int(self._page["serial"][0])

    @property
    def passed_on(self) -> bool:
        """Whether workers have begun a loop since the position was set: they are ahead of it."""
        newest = self._newest()
        return newest is not None and self._loops["serial"][newest] == self.serial

    def set(self, position: Position) -> int:
        """Note the reader's position, from which the next loop of workers begins; its serial."""
        with self._locked():
            self._page["serial"] += 1
            _write(self._page, 0, position)
            return self.serial

    def follow(self, position: Position) -> None:
        """Note where the reader itself has got to, if workers could want to begin there.

        Those that are still to be started get its position with the copy.
        """
        if self._page["begun"][0]:
            self.set(position)

    def begin(
        self, seat: Seat, copy: Copy, *, batches: int, epochs: int | None
    ) -> tuple[Position, int]:
        """Where a worker begins, the same for all workers of a loop; and as of which serial.

        Raises:
            UsageError: the loop before had no end, and nobody knows where it was left.
        """
        with self._locked():
            loop = self._loop_of(seat)
            if loop is None:
                loop = self._add(seat, self._next(seat, copy), batches=batches, epochs=epochs)
            if seat.worker < _WORKERS:
                self._loops["joined"][loop, seat.worker] = True
            if self._loops["refused"][loop]:
                raise UsageError(
                    "a second loop over a DataLoader with workers, of a reader with epochs=None: "
                    "where the training left the first one is not known here; keep its iterator, "
                    "call set_epoch before each loop, or use num_workers=0"
                )
            position = copy.position if copy.loaded else _read(self._loops, loop)
            if position.origin is None:
                position = position.begun(epochs)
                position = replace(position, origin=position.epoch * batches + position.batch)
            elif position.until is not None and position.until <= position.epoch:
                self._loops["ended"][loop] += 1  # a loop that was resumed after its last batch
            serial = int(self._loops["serial"][loop])
        return replace(position, worker=seat.worker, workers=seat.workers), serial

    def end(self, seat: Seat) -> None:
        """Note that a worker has come to the end of its loop."""
        with suppress(DeadlineError), self._locked():
            self._loops["ended"] += self._of(seat)

    def close(self) -> None:
        """Let go of the memory; other processes keep it."""
        self._page = self._loops = None
        self._arena.close()

    def __del__(self) -> None:
        """Readers are mostly left to the collector."""
        with suppress(AttributeError):  # it was never made
            self.close()

    def _newest(self) -> int | None:
        begun = int(self._page["begun"][0])
        return (begun - 1) % _LOOPS if begun else None

    def _of(self, seat: Seat) -> Any:
        """Which loops are those of a seat: one at most, but for DataLoaders of the same seed."""
        found = self._loops["workers"] == seat.workers
        return found & (self._loops["seed"] == seat.seed) & (self._loops["loop"] == seat.loop)

    def _loop_of(self, seat: Seat) -> int | None:
        """The loop that others of this seat's DataLoader have begun already."""
        found = self._of(seat)
        if seat.worker < _WORKERS:
            # A worker is in a loop once. One that is in it already is of an earlier DataLoader
            # that has drawn the same seed, as it does if the training seeds torch each epoch.
            found &= ~self._loops["joined"][:, seat.worker]
        return int(np.argmax(found)) if found.any() else None

    def _next(self, seat: Seat, copy: Copy) -> Position | None:
        """Where a loop begins that no other worker has begun yet; None if nobody knows."""
        if copy.loaded:
            return copy.position
        newest = self._newest()
        if newest is None or not self.passed_on:
            # Not from the copy, if the reader has been set to another position since.
            return copy.position if copy.serial == self.serial else _read(self._page, 0)
        until = _read(self._loops, newest).until
        overtaken = self._loops["seed"][newest] == seat.seed and (
            self._loops["loop"][newest] > seat.loop
        )
        if overtaken and copy.last is not None:
            until = copy.last.until  # others are so far ahead that this loop is forgotten
        if until is None:
            return None
        self._warn(newest)
        return Position(epoch=until, until=until)

    def _warn(self, left: int) -> None:
        if self._loops["ended"][left] >= self._loops["workers"][left] or self._page["told"][0]:
            return
        self._page["told"] = 1
        _log.warning(
            "a loop over a DataLoader with workers was left before its end; the next one begins "
            "with epoch %d, and what was left of the epochs before is not read. Call "
            "reader.set_epoch before a loop to say otherwise. This is said once.",
            self._loops["until"][left],
        )

    def _add(self, seat: Seat, start: Position | None, *, batches: int, epochs: int | None) -> int:
        # A refused loop is noted, too: a worker of it that starts late, when the reader has been
        # set to another position, must not take that for its own loop.
        refused = start is None
        if start is None:
            start = Position(until=None)
        elif start.origin is None:
            start = start.begun(epochs)
        else:  # one worker's position in a loop that is gone on with
            epoch, batch = divmod(start.origin, batches)
            start = replace(start, epoch=epoch, batch=batch)
        at = int(self._page["begun"][0]) % _LOOPS
        for name, value in (
            ("seed", seat.seed),
            ("loop", seat.loop),
            ("workers", seat.workers),
            ("serial", self.serial),
            ("ended", 0),
            ("refused", refused),
            ("joined", False),
        ):
            self._loops[name][at] = value
        _write(self._loops, at, start)
        self._page["begun"] += 1
        return at

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.lockf(self._arena.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"another copy of this reader has held its position for {_PATIENCE:g} s: "
                        "a worker of the DataLoader, or the training's process, is stopped"
                    ) from None
                time.sleep(_PAUSE)
        try:
            yield
        finally:
            fcntl.lockf(self._arena.fd, fcntl.LOCK_UN)


class Refused:
    """What a worker iterates over if it cannot begin: the reason comes with the first batch.

    torch ends a persistent worker whose ``iter`` raises, and the training would only hear that it
    is gone.
    """

    def __init__(self, why: Exception) -> None:
        """``why`` is raised by the first ``next``."""
        self._why = why

    def __iter__(self) -> Refused:
        """An iterator is its own."""
        return self

    def __next__(self) -> NoReturn:
        """There is no batch."""
        raise self._why


def _write(table: Any, row: int, position: Position) -> None:
    table["epoch"][row], table["batch"][row] = position.epoch, position.batch
    table["until"][row] = _NONE if position.until is None else position.until


def _read(table: Any, row: int) -> Position:
    until = int(table["until"][row])
    return Position(
        epoch=int(table["epoch"][row]),
        batch=int(table["batch"][row]),
        until=None if until == _NONE else until,
    )
