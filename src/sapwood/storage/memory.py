"""Objects in this process's memory: gone with it, and as fast as memory is.

What is large lies in a memfd of its own, sealed once it is published: other processes can be given
its descriptor and map it, and nobody can change it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from sapwood.buffers.handover import Handover, HandoverPool, copy_to, is_sealed
from sapwood.errors import AlreadyThere, NoRoom, NotFound, StorageError
from sapwood.storage.base import Descriptor, Durability, Entry
from sapwood.storage.common import CommonDraft, CommonKeeper, bytes_of, too_large
from sapwood.storage.keys import checked_key
from sapwood.storage.mapped import Mapped, map_file
from sapwood.storage.preads import read_pieces
from sapwood.storage.ranges import Pieces, check_within
from sapwood.storage.room import storage_error

__all__ = ["MemoryKeeper"]

_LARGE = 64 * 1024
"""From this size on an object has a memfd: a descriptor for less would cost more than it."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(eq=False)
class _File:
    """A memfd, closed once neither the keeper nor a reader has it."""

    fd: int

    def __post_init__(self) -> None:
        """Whoever reads holds this object, and with it the descriptor."""
        weakref.finalize(self, os.close, self.fd).atexit = False


@dataclass(frozen=True, eq=False)
class _Object:
    nbytes: int
    rests: _File | memoryview
    changed: float = field(default_factory=time.time)

    def fill(self, key: str, pieces: Pieces) -> None:
        if isinstance(self.rests, _File):
            read_pieces(self.rests.fd, key, pieces)
            return
        check_within(key, self.nbytes, pieces)
        for at, out in pieces:
            out[:] = self.rests[at : at + len(out)]


class MemoryKeeper(CommonKeeper):
    """Objects in memory. Fulfils ``Keeper`` and every capability there is."""

    durability = Durability.MEMORY

    def __init__(self, *, limit: int | None = None, pool: HandoverPool | None = None) -> None:
        """``limit``: bytes of all objects and drafts together; more is refused with ``NoRoom``.

        ``pool``: where memory for what is large comes from, if its size is known from the first;
        this object's to close.
        """
        super().__init__("memory")
        self.pool = pool
        self._objects: dict[str, _Object] = {}
        self._folders: dict[str, int] = {}
        self._changing = threading.Lock()
        self._limit = limit
        self._used = 0

    # -- writing -----------------------------------------------------------------------------

    def _begin(
        self, key: str, nbytes: int | None, *, replace: bool, durability: Durability
    ) -> _MemoryDraft:
        if not replace and key in self._objects:
            raise already_there(key)
        return _MemoryDraft(self, key, nbytes, replace=replace)

    def adopt(
        self,
        key: str,
        memory: Any,
        *,
        replace: bool = False,
        given_back: Callable[[], None] | None = None,
    ) -> None:
        """Keep memory where it is; it does not count against the limit."""
        checked_key(key)
        data = bytes_of(memory)
        self._check_open()
        if len(data):
            # What maps or reads the memory holds this array; with the last of them it goes.
            holder: Any = np.frombuffer(data, np.uint8)
            holder.flags.writeable = False
            self.add(key, _Object(len(data), memoryview(holder)), replace=replace)
            if given_back is not None:
                weakref.finalize(holder, given_back).atexit = False
            return
        self.add(key, _Object(0, memoryview(b"")), replace=replace)
        if given_back is not None:
            given_back()

    def keep(self, key: str, fd: int, *, replace: bool = False) -> None:
        """Keep sealed memory as an object; the descriptor is the keeper's, also if this fails.

        Raises:
            StorageError: somebody could still change it.
        """
        file = _File(fd)
        checked_key(key)
        self._check_open()
        if not is_sealed(fd):
            raise StorageError(
                f"{key}: what was passed is not memory that is sealed against every change"
            )
        nbytes = os.fstat(fd).st_size
        self.reserve(key, nbytes)
        try:
            self.add(key, _Object(nbytes, file), replace=replace)
        except BaseException:
            self.release(nbytes)
            raise

    def link(self, source: str, key: str, *, durability: Durability | None = None) -> None:
        """Let two keys have one object; where both are kept, its bytes count once more."""
        checked_key(key)
        self.level(durability)
        found = self._found(checked_key(source))
        if not _is_adopted(found):
            self.reserve(key, found.nbytes)
        try:
            self.add(key, _Object(found.nbytes, found.rests), replace=False)
        except BaseException:
            self.release(found)
            raise

    def add(self, key: str, made: _Object, *, replace: bool) -> None:
        """Publish."""
        with self._changing:
            self._check_open()
            self._check_folders(key)
            old = self._objects.get(key)
            if old is not None and not replace:
                raise already_there(key)
            self._objects[key] = made
            if old is None:
                self._count_folders(key, 1)
        if old is not None:
            self.release(old)

    def reserve(self, key: str, nbytes: int) -> None:
        """Take room for a draft.

        Raises:
            NoRoom: there is not enough.
        """
        with self._changing:
            if self._limit is not None and self._used + nbytes > self._limit:
                raise NoRoom(
                    f"{key} does not fit: {self._used} of {self._limit} bytes are in use, and "
                    f"{nbytes} more are needed"
                )
            self._used += nbytes

    def release(self, gone: _Object | int) -> None:
        """Give room back."""
        if isinstance(gone, _Object):
            gone = 0 if _is_adopted(gone) else gone.nbytes
        with self._changing:
            self._used -= gone

    def _check_folders(self, key: str) -> None:
        above = _folders_of(key)
        if key in self._folders or any(one in self._objects for one in above):
            raise StorageError(
                f"{key}: a key cannot be an object and the folder of others at the same time"
            )

    def _count_folders(self, key: str, by: int) -> None:
        for one in _folders_of(key):
            self._folders[one] = self._folders.get(one, 0) + by
            if not self._folders[one]:
                del self._folders[one]

    # -- reading -----------------------------------------------------------------------------

    def _found(self, key: str) -> _Object:
        self._check_open()
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"there is no {key} in memory")
        return found

    def _size(self, key: str) -> int:
        return self._found(key).nbytes

    def _get(self, key: str, limit: int) -> bytes:
        found = self._found(key)
        if found.nbytes > limit:
            raise too_large(key, found.nbytes, limit)
        memory = bytearray(found.nbytes)
        found.fill(key, [(0, memoryview(memory))])
        return bytes(memory)

    def _read(self, wanted: Mapping[str, Pieces]) -> None:
        for key, pieces in wanted.items():
            self._found(key).fill(key, pieces)

    def map(self, key: str, *, writable: bool = False) -> Mapped:
        """Its bytes; a small object is copied where it is to be writable."""
        found = self._found(checked_key(key))
        if isinstance(found.rests, _File):
            try:
                return map_file(found.rests.fd, found.nbytes, writable=writable)
            except OSError as error:
                raise storage_error(f"cannot map {key}", error) from error
        if writable:
            return Mapped(memoryview(bytearray(found.rests)))
        return Mapped(found.rests[:])

    def descriptor(self, key: str) -> Descriptor:
        """A descriptor of its memfd; of a small or adopted object, of a copy."""
        found = self._found(checked_key(key))
        try:
            if isinstance(found.rests, _File):
                return Descriptor(os.dup(found.rests.fd), 0, found.nbytes)
            fd = _new_file()
            try:
                _write_all(fd, [found.rests], 0)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(fd)
                raise
            return Descriptor(fd, 0, found.nbytes)
        except OSError as error:
            raise storage_error(f"cannot share {key}", error) from error

    def _list(self, folder: str) -> Iterable[Entry]:
        with self._changing:
            return [
                Entry(key, found.nbytes, found.changed)
                for key, found in self._objects.items()
                if not folder or key.startswith(f"{folder}/")
            ]

    # -- removing ----------------------------------------------------------------------------

    def _remove(self, keys: Sequence[str], durability: Durability) -> None:
        for key in keys:
            with self._changing:
                old = self._objects.pop(key, None)
                if old is not None:
                    self._count_folders(key, -1)
            if old is not None:
                self.release(old)

    def _end(self) -> None:
        with self._changing:
            # Adopted memory is given back outside the lock, by whoever holds it last.
            _, self._objects = self._objects, {}
            self._folders.clear()
        if self.pool is not None:
            self.pool.close()


class _MemoryDraft(CommonDraft):
    """Bytes that nobody sees yet. Fulfils ``Draft``."""

    def __init__(
        self, keeper: MemoryKeeper, key: str, nbytes: int | None, *, replace: bool
    ) -> None:
        super().__init__(keeper, key, nbytes, replace=replace)
        self._memory = keeper
        self._small = bytearray()
        self._file: _File | None = None
        self._piece: Handover | None = None
        self._reserved = 0
        self._reserve(nbytes or 0)

    def direct(self) -> memoryview | None:
        """All of its memory, to be filled in place of writing; gone before ``publish``.

        None where it has no memory of its own.
        """
        piece = self._handover()
        if piece is None or self.written:
            return None
        self.written = piece.nbytes
        return piece.bytes.data

    def _handover(self) -> Handover | None:
        pool = self._memory.pool
        if self._piece is None and pool is not None and (self.nbytes or 0) >= _LARGE:
            self._piece = pool.take(self.nbytes or 0)
        return self._piece

    def _take(self, parts: Sequence[memoryview]) -> None:
        total = self.written + sum(map(len, parts))
        try:
            self._reserve(total)
            if (piece := self._handover()) is not None:
                starts = list(accumulate(map(len, parts), initial=self.written))
                copy_to(piece, starts[:-1], parts)
                return
            if self._file is None and max(total, self.nbytes or 0) < _LARGE:
                for part in parts:
                    self._small += part
                return
            if self._file is None:
                self._file = _File(_new_file())
                _write_all(self._file.fd, [memoryview(self._small)], 0)
                self._small = bytearray()
            _write_all(self._file.fd, parts, self.written)
        except NoRoom:
            self.discard()
            raise
        except OSError as error:
            self.discard()
            raise storage_error(f"cannot keep {self.key} in memory", error) from error

    def _reserve(self, total: int) -> None:
        if total > self._reserved:
            self._memory.reserve(self.key, total - self._reserved)
            self._reserved = total

    def _publish(self) -> None:
        rests: _File | memoryview = memoryview(bytes(self._small))
        if self._piece is not None:
            self._file, self._piece = _File(self._piece.seal()), None
            rests = self._file
        elif self._file is not None:
            fcntl.fcntl(self._file.fd, fcntl.F_ADD_SEALS, _SEALS)
            rests = self._file
        self._memory.add(self.key, _Object(self.written, rests), replace=self.replace)
        self._file = None

    def _forget(self) -> None:
        if self._piece is not None:
            self._piece.close()
        self._file, self._small, self._piece = None, bytearray(), None
        self._memory.release(self._reserved)


def already_there(key: str) -> AlreadyThere:
    """For whoever came second."""
    return AlreadyThere(f"{key} is in memory already")


def _is_adopted(one: _Object) -> bool:
    return isinstance(one.rests, memoryview) and isinstance(one.rests.obj, np.ndarray)


def _folders_of(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _new_file() -> int:
    return os.memfd_create("sapwood-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _write_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    left = [part for part in parts if len(part)]
    while left:
        count = os.pwritev(fd, left[:1024], offset)
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
