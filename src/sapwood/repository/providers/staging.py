"""A client's side of passing memory: tensors are packed into it, and it is sealed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sapwood.buffers import Handover, HandoverPool
from sapwood.buffers.handover import copy_to
from sapwood.repository.packs import lay_out

__all__ = ["Stage", "address_of"]

_Signature = tuple[tuple[int, int], ...]


class Stage:
    """Packs buffers into memory for one provider. Owns the memory; its user closes it.

    Thread-safe. A forked child has none of its parent's memory, and makes its own.
    """

    def __init__(self, policy: str) -> None:
        """``policy`` as in ``HandoverPool``."""
        self._policy = policy
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: HandoverPool | None = None
        self._ahead: dict[_Signature, _Copying] = {}

    def pool(self) -> HandoverPool:
        """Where memory comes from."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._pool is None:
                self._pool = HandoverPool(policy=self._policy)
            return self._pool

    def packed(self, buffers: Sequence[memoryview]) -> int:
        """Sealed memory that holds buffers as a pack does; its descriptor is the caller's.

        Raises:
            NoRoom: the machine has no more.
        """
        pool = self.pool()
        with self._lock:
            copying = self._ahead.pop(_signature(buffers), None)
        if copying is None:
            copying = _Copying(pool, buffers)
            copying.run()
        with copying.result() as memory:
            return memory.seal()

    @contextmanager
    def ahead(self, buffers: Sequence[memoryview]) -> Iterator[None]:
        """Copy buffers on a thread, for a ``packed`` of the same ones inside the block."""
        copying = _Copying(self.pool(), buffers)
        signature = _signature(buffers)
        thread = threading.Thread(target=copying.run, name="sapwood-stage", daemon=True)
        with self._lock:
            self._ahead[signature] = copying
        thread.start()
        try:
            yield
        finally:
            with self._lock:
                unused = self._ahead.get(signature) is copying
                if unused:
                    del self._ahead[signature]
            thread.join()
            if unused:
                copying.discard()

    def close(self) -> None:
        """Give memory back. Calling it again does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.close()


class _Copying:
    """Buffers on their way into memory."""

    def __init__(self, pool: HandoverPool, buffers: Sequence[memoryview]) -> None:
        self._pool, self._buffers = pool, buffers
        self._memory: Handover | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            starts, nbytes = lay_out([len(buffer) for buffer in self._buffers])
            self._memory = self._pool.take(nbytes)
            copy_to(self._memory, starts, self._buffers)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Handover:
        """The memory, once all is in it."""
        self._ended.wait()  # on a thread that copies, and does nothing else
        if self._error is not None:
            self.discard()
            raise self._error
        assert self._memory is not None
        return self._memory

    def discard(self) -> None:
        if self._memory is not None:
            self._memory.close()


def address_of(buffer: Any) -> int:
    """Where a buffer is in this process's memory."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _signature(buffers: Sequence[memoryview]) -> _Signature:
    """Which buffers these are."""
    return tuple((address_of(buffer), len(buffer)) for buffer in buffers)
