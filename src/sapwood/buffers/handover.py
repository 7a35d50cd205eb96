"""Shared memory that is filled here, and then given to another process for good.

    with HandoverPool() as pool:
        memory = pool.take(nbytes)
        copy_to(memory, starts, sources)
        connection.send(..., fds=[memory.seal()])   # nobody can change the bytes any more

Sealed memory cannot be written to by anybody, who made it included: whoever keeps it needs no copy
of its own, and may pass it on. It is not used again, so that its pages are allocated anew for each
save. That takes longer than to copy the bytes, and so it is done ahead of need: for each of the
sizes taken last, a thread keeps one piece ready, with its pages mapped. ``policy="on_demand"``
leaves that out: what the above is compared with.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from sapwood.buffers.available import available_memory
from sapwood.buffers.copying import copy_ranges
from sapwood.buffers.mapping import HUGE_PAGE, Bytes, Mapping, round_up
from sapwood.buffers.policies import show
from sapwood.errors import ConfigError, NoRoom, StorageError, UsageError

__all__ = ["SEALS", "Handover", "HandoverPool", "HandoverStats", "copy_to", "is_sealed"]

_log = logging.getLogger(__name__)
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_SIZES = 4
"""Sizes that pieces are kept ready for."""
_WASTE = 8
"""A piece is taken for what needs at least all but one of so many parts of it."""
_RESERVE = 64 * 2**20
"""Left to others when memory is made ahead."""
_END_SECONDS = 60.0


class Handover:
    """One piece of memory: write to ``view``, then ``seal``; or ``close`` it unused."""

    def __init__(self, fd: int, mapping: Mapping, nbytes: int) -> None:
        """The pool makes them; the descriptor and the mapping are this object's."""
        self.nbytes = nbytes
        self._fd = fd
        self._mapping: Mapping | None = mapping

    @property
    def bytes(self) -> Bytes:
        """Its memory, writable; no array or view of it may be left when it is sealed."""
        if self._mapping is None:
            raise UsageError("this memory was sealed or closed")
        return self._mapping.bytes[: self.nbytes]

    @property
    def address(self) -> int:
        """Where it is in this process's memory."""
        if self._mapping is None:
            raise UsageError("this memory was sealed or closed")
        return self._mapping.address

    def seal(self) -> int:
        """Make it unchangeable; its descriptor, which is the caller's to close.

        Raises:
            UsageError: an array or view of it is left, in this process or a fork of it.
        """
        self._mapping = None
        fd, self._fd = self._fd, -1
        if fd < 0:
            raise UsageError("this memory was sealed or closed")
        try:
            if os.fstat(fd).st_size != self.nbytes:
                os.ftruncate(fd, self.nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(fd)
            raise UsageError(
                f"shared memory cannot be sealed ({error.strerror}): something still maps it"
            ) from error
        return fd

    def close(self) -> None:
        """Give it up; does nothing after ``seal``, or when called again."""
        self._mapping = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        """It is closed at the end of the block, unless it was sealed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it, unless it was sealed."""
        self.close()


@dataclass(frozen=True, kw_only=True)
class HandoverStats:
    """What a pool did; sizes in bytes."""

    ready: int
    """Memory that waits to be taken."""
    ahead: int
    """Memory that was there before it was needed."""
    late: int
    """Memory that somebody had to wait for."""
    seconds: float
    """What making memory took, wherever it was done."""


class HandoverPool:
    """Makes memory to be handed over, some of it ahead. Thread-safe; not for forked children.

    Owns its thread, and the memory that is ready; its user closes it.
    """

    def __init__(
        self, *, ready: int = 4 * 2**30, policy: str = "preallocated", label: str = "handover"
    ) -> None:
        """``ready``: how much memory may wait to be taken.

        Raises:
            ConfigError: there is no such policy.
        """
        if policy not in ("preallocated", "on_demand"):
            raise ConfigError(f"policy={policy!r}: it is 'preallocated' or 'on_demand'")
        self.policy, self._limit, self._label = policy, ready, label
        self._changed = threading.Condition()
        self._ready: list[tuple[int, Handover]] = []
        self._sizes: list[int] = []
        self._making = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ahead = self._late = 0
        self._seconds = 0.0

    def take(self, nbytes: int) -> Handover:
        """Memory for ``nbytes``; its pages are there.

        Raises:
            NoRoom: the machine has no more.
        """
        size = round_up(max(nbytes, 1), HUGE_PAGE)
        with self._changed:
            if self._closed:
                raise UsageError("this pool of memory was closed")
            found = self._one(size)
            while found is None and self._making and _fits(self._making, size):
                self._changed.wait(1.0)  # sooner there than what is begun now
                found = self._one(size)
            self._note(size)
            if found is None:
                self._late += size
            else:
                self._ahead += size
        if found is None:
            found = self._make(size)
        found.nbytes = nbytes
        return found

    def _one(self, size: int) -> Handover | None:
        fitting = [entry for entry in self._ready if _fits(entry[0], size)]
        if not fitting:
            return None
        best = min(fitting, key=lambda entry: entry[0])
        self._ready.remove(best)
        return best[1]

    def _note(self, size: int) -> None:
        """Have one of this size next time."""
        if self.policy == "on_demand":
            return
        self._sizes = [size, *(one for one in self._sizes if one != size)][:_SIZES]
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name=f"sapwood-{self._label}-memory", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._making = size = self._lacking()
                if not size:
                    self._thread = None
                    self._changed.notify_all()
                    return
            made = None
            try:
                made = self._make(size)
            except (StorageError, OSError) as error:
                _log.info("no memory is made ahead for now: %s", error)
            with self._changed:
                self._making = 0
                if made is None:
                    self._sizes = [one for one in self._sizes if one != size]
                elif self._closed:
                    made.close()
                else:
                    self._ready.append((size, made))
                self._changed.notify_all()

    def _lacking(self) -> int:
        """The size of the next piece to be made, 0 if all are there; the lock is held."""
        if self._closed:
            return 0
        wanted, total = [], 0
        for size in self._sizes:
            if total + size <= self._limit:
                wanted.append(size)
                total += size
        for entry in [entry for entry in self._ready if entry[0] not in wanted]:
            self._ready.remove(entry)
            entry[1].close()
        there = [size for size, _ in self._ready]
        return next((size for size in wanted if size not in there), 0)

    def _make(self, size: int) -> Handover:
        began = time.monotonic()
        if size + _RESERVE > available_memory():
            raise NoRoom(
                f"{show(size)} of shared memory do not fit: the machine has "
                f"{show(available_memory())} left"
            )
        try:
            fd = os.memfd_create(f"sapwood-{self._label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NoRoom(f"the system gave no memory: {error.strerror}") from error
        try:
            os.ftruncate(fd, size)
            mapping = Mapping(fd, size)
            # A forked child that maps it would keep it from being sealed.
            mapping.keep_from_children()
            if self.policy == "preallocated":
                mapping.fault_in(fd, 0, size)
            else:
                os.posix_fallocate(fd, 0, 1)
        except OSError as error:
            os.close(fd)
            raise NoRoom(f"the system gave no memory: {error.strerror or error}") from error
        with self._changed:
            self._seconds += time.monotonic() - began
        return Handover(fd, mapping, size)

    def prepare(self, nbytes: int, timeout: float = 60.0) -> None:
        """Have memory of a size ready before it is needed; returns when it is, or cannot be."""
        size = round_up(max(nbytes, 1), HUGE_PAGE)
        deadline = time.monotonic() + timeout
        with self._changed:
            self._note(size)
            while self._thread is not None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def stats(self) -> HandoverStats:
        """What it has and did, now."""
        with self._changed:
            return HandoverStats(
                ready=sum(size for size, _ in self._ready),
                ahead=self._ahead,
                late=self._late,
                seconds=self._seconds,
            )

    def close(self) -> None:
        """End the thread and give back what was not taken. Calling it again does nothing."""
        with self._changed:
            self._closed = True
            ready, self._ready = self._ready, []
            thread = self._thread
        for _, piece in ready:
            piece.close()
        if thread is not None:
            thread.join(_END_SECONDS)

    def __enter__(self) -> Self:
        """It is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def copy_to(memory: Handover, starts: Sequence[int], sources: Sequence[Any]) -> None:
    """Copy buffers to their places in a piece of memory.

    Raises:
        UsageError: they do not fit.
    """
    arrays = [np.frombuffer(source, np.uint8) for source in sources]
    for start, array in zip(starts, arrays, strict=True):
        if start < 0 or start + array.nbytes > memory.nbytes:
            raise UsageError(
                f"{array.nbytes} bytes at {start} are beyond memory of {memory.nbytes}"
            )
    base = memory.address
    copy_ranges(
        [
            (base + start, array.__array_interface__["data"][0], array.nbytes)
            for start, array in zip(starts, arrays, strict=True)
        ]
    )


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is of memory that nobody can change, or make shorter or longer."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no memfd at all
        return False


def _fits(piece: int, size: int) -> bool:
    return size <= piece <= size + max(size // (_WASTE - 1), HUGE_PAGE)
