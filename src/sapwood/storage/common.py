"""What keepers have in common: checks before anything is touched, drafts, and work on threads.

A keeper need not be made of these; one that is has five methods to write.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from sapwood.errors import ConfigError, Damaged, StorageError, Truncated, UsageError
from sapwood.storage.base import QUIET_SECONDS, Durability, Entry, Pending, Wanted
from sapwood.storage.keys import checked_folder, checked_key
from sapwood.storage.ranges import Pieces

__all__ = ["SMALL", "CommonDraft", "CommonKeeper", "Job", "bytes_of"]

SMALL = 64 * 2**20
"""What ``get`` takes into memory unless it is told otherwise."""
_THREADS = 4
T = TypeVar("T")
Self = TypeVar("Self", bound="CommonDraft")


def bytes_of(data: Any) -> memoryview:
    """The bytes of a buffer.

    Raises:
        UsageError: it is none, or lies scattered.
    """
    try:
        return memoryview(data).cast("B")
    except (TypeError, BufferError) as error:
        raise UsageError(f"{type(data).__name__} is no contiguous buffer: {error}") from error


class Job:
    """Work on another thread. Fulfils ``Pending``."""

    def __init__(self, future: Future[None]) -> None:
        """It was submitted."""
        self._future = future

    def wait(self) -> None:
        """Its outcome."""
        self._future.result()

    def close(self) -> None:
        """Do not begin it, or wait for its end: buffers must not be written to afterwards."""
        if not self._future.cancel():
            self._future.exception()


class CommonDraft(ABC):
    """Counts bytes, and knows whether it is open, sealed or over. Fulfils ``Draft``."""

    def __init__(
        self, keeper: CommonKeeper, key: str, nbytes: int | None, *, replace: bool
    ) -> None:
        """Made by keepers."""
        self.key = key
        self.nbytes = nbytes
        self.replace = replace
        self.written = 0
        self._keeper = keeper
        self._job: Pending | None = None
        self._over = False
        # The keeper may be closed while a thread writes: a descriptor closed under it could be
        # another file's by the time it writes again.
        self._busy = threading.RLock()

    # -- what a keeper adds ------------------------------------------------------------------

    @abstractmethod
    def _take(self, parts: Sequence[memoryview]) -> None:
        """Append bytes; none of the parts is empty."""

    @abstractmethod
    def _publish(self) -> None:
        """Publish; if that fails, ``_forget`` follows."""

    @abstractmethod
    def _forget(self) -> None:
        """Give back what it takes. Never raises ``StorageError``."""

    # -- the contract ------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Append bytes."""
        self.write_parts([data])

    def write_parts(self, parts: Iterable[Any]) -> None:
        """Append many."""
        views = [view for part in parts if len(view := bytes_of(part))]
        more = sum(map(len, views))
        with self._busy:
            self._check_open()
            if self.nbytes is not None and self.written + more > self.nbytes:
                raise Damaged(
                    f"{self.key} was announced with {self.nbytes} bytes, but at least "
                    f"{self.written + more} were given"
                )
            self._take(views)
            self.written += more

    def seal(self) -> Pending:
        """Publish on another thread."""
        self._check_open()
        self._check_whole()
        self._job = self._keeper.spawn(self._finish)
        return self._job

    def publish(self) -> None:
        """Publish now."""
        self._check_open()
        self._check_whole()
        self._finish()

    def discard(self) -> None:
        """Forget it; one that is being published is, first."""
        if self._job is not None:
            job, self._job = self._job, None
            job.close()
        self._end()

    def __enter__(self: Self) -> Self:
        """Discard at the end, unless published."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Discard, unless published."""
        self.discard()

    # -- states ------------------------------------------------------------------------------

    def _finish(self) -> None:
        with self._busy:
            if self._over:
                raise UsageError(f"the draft of {self.key} was discarded before")
            try:
                self._publish()
            except BaseException:
                self._end()
                raise
            self._over = True
        self._keeper.forget(self)

    def _end(self) -> None:
        with self._busy:
            over, self._over = self._over, True
            if not over:
                self._forget()
        self._keeper.forget(self)

    def _check_open(self) -> None:
        if self._over or self._job is not None:
            raise UsageError(f"the draft of {self.key} was published or discarded before")

    def _check_whole(self) -> None:
        if self.nbytes is not None and self.written != self.nbytes:
            given = self.written
            self.discard()
            raise Truncated(
                f"{self.key} was announced with {self.nbytes} bytes, but {given} were given; "
                "nothing was kept"
            )


class CommonKeeper(ABC):
    """Checks, then asks the place. Fulfils ``Keeper`` but for ``durability`` and ``sweep``."""

    def __init__(self, name: str) -> None:
        """``name`` is for messages, and for the names of threads."""
        self.name = name
        self._lock = threading.Lock()
        self._drafts: set[CommonDraft] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    # -- what a keeper adds ------------------------------------------------------------------

    @property
    @abstractmethod
    def durability(self) -> Durability:
        """The most it can promise."""

    @abstractmethod
    def _begin(
        self, key: str, nbytes: int | None, *, replace: bool, durability: Durability
    ) -> CommonDraft:
        """Begin an object."""

    @abstractmethod
    def _size(self, key: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    def _read(self, wanted: Mapping[str, Pieces]) -> None:
        """Fill buffers, by object; in each at least one piece, which may be empty."""

    @abstractmethod
    def _list(self, folder: str) -> Iterable[Entry]:
        """Objects in any order."""

    @abstractmethod
    def _remove(self, keys: Sequence[str], durability: Durability) -> None:
        """Remove objects."""

    @abstractmethod
    def _get(self, key: str, limit: int) -> bytes:
        """A small object; size and bytes are of one and the same, also if it is replaced."""

    def _end(self) -> None:  # noqa: B027 - most have nothing
        """Give back what the keeper itself has; drafts and threads are gone."""

    # -- the contract ------------------------------------------------------------------------

    def begin(
        self,
        key: str,
        nbytes: int | None = None,
        *,
        replace: bool = False,
        durability: Durability | None = None,
    ) -> CommonDraft:
        """Begin an object."""
        checked_key(key)
        if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
            raise UsageError(f"{key}: nbytes={nbytes!r}, expected a number of bytes, or None")
        level = self.level(durability)
        self._check_open()
        draft = self._begin(key, nbytes, replace=replace, durability=level)
        with self._lock:
            closed = self._closed
            self._drafts.add(draft)
        if closed:
            draft.discard()
            self._check_open()
        return draft

    def put(
        self,
        key: str,
        parts: Sequence[Any],
        *,
        replace: bool = False,
        durability: Durability | None = None,
    ) -> None:
        """Keep some buffers as one object."""
        views = [bytes_of(part) for part in parts]
        total = sum(map(len, views))
        with self.begin(key, total, replace=replace, durability=durability) as draft:
            draft.write_parts(views)
            draft.publish()

    def size(self, key: str) -> int:
        """Bytes of an object."""
        checked_key(key)
        self._check_open()
        return self._size(key)

    def get(self, key: str, *, limit: int = SMALL) -> bytes:
        """A small object."""
        checked_key(key)
        self._check_open()
        return self._get(key, limit)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill buffers."""
        grouped = _grouped(wanted)
        self._check_open()
        if grouped:
            self._read(grouped)

    def ask(self, wanted: Sequence[Wanted]) -> Job:
        """Fill buffers on another thread."""
        grouped = _grouped(wanted)
        self._check_open()
        return self.spawn(lambda: self._read(grouped) if grouped else None)

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Objects in order."""
        checked_folder(folder)
        self._check_open()
        return iter(sorted(self._list(folder)))

    def remove(self, keys: Iterable[str], *, durability: Durability | None = None) -> None:
        """Remove objects."""
        known = [checked_key(key) for key in _many(keys)]
        level = self.level(durability)
        self._check_open()
        if known:
            self._remove(known, level)

    def sweep(self, quiet: float = QUIET_SECONDS) -> int:
        """Nothing is left by dead writers here."""
        self._check_open()
        return 0

    def close(self) -> None:
        """Discard drafts, end threads."""
        with self._lock:
            closed, self._closed = self._closed, True
            drafts, pool = list(self._drafts), self._pool
        if closed:
            return
        for draft in drafts:
            with suppress(StorageError):
                draft.discard()
        if pool is not None:
            pool.shutdown(wait=True)
        self._end()

    def __enter__(self: K) -> K:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    # -- for drafts and subclasses -----------------------------------------------------------

    def level(self, durability: Durability | None) -> Durability:
        """What is promised.

        Raises:
            ConfigError: more is asked for than there is.
        """
        most = self.durability
        if durability is None:
            return min(Durability.WRITTEN, most)
        if durability > most:
            raise ConfigError(
                f"{self.name}: durability {durability.name} is asked for, but it promises "
                f"{most.name} at most; ask for that, or take another place"
            )
        return durability

    def spawn(self, work: Callable[[], None]) -> Job:
        """Begin work on a thread of this keeper's."""
        with self._lock:
            if self._closed:
                raise UsageError(f"{self.name} is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sapwood-keeper")
            return Job(self._pool.submit(work))

    def forget(self, draft: CommonDraft) -> None:
        """A draft is over."""
        with self._lock:
            self._drafts.discard(draft)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name} is closed")


K = TypeVar("K", bound=CommonKeeper)


def too_large(key: str, size: int, limit: int) -> StorageError:
    """For ``get``."""
    return StorageError(f"{key} has {size} bytes, more than the {limit} that were expected")


def _many(keys: Iterable[str]) -> Iterable[str]:
    if isinstance(keys, str):  # whose letters would all be keys
        raise UsageError(f"remove takes several keys: remove([{keys!r}])")
    return keys


def _grouped(wanted: Sequence[Wanted]) -> Mapping[str, Pieces]:
    """By object, checked before anything is touched."""
    grouped: dict[str, list[tuple[int, memoryview]]] = {}
    for one in wanted:
        key, out = checked_key(one.key), bytes_of(one.out)
        if out.readonly:
            raise UsageError(f"{key}: the buffer to read into is read-only")
        if not isinstance(one.start, int) or one.start < 0:
            raise UsageError(f"{key}: a range begins at {one.start!r}, expected 0 or more")
        grouped.setdefault(key, []).append((one.start, out))
    return grouped
