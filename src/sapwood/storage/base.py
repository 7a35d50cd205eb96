"""The contract of a keeper: how bytes rest in one kind of place.

An object is a run of bytes under a key (``storage.keys`` says what a key is). It is there whole or
not at all, and never changes: whoever puts other bytes under its key says ``replace=True``, and
whoever was reading the old ones goes on with them, or is told.

    with keeper.begin("packs/3f9a1c", nbytes) as draft:     # nobody sees it yet
        draft.write_parts(parts)
        draft.publish()                                     # all of it, atomically, or AlreadyThere
    keeper.read([Wanted("packs/3f9a1c", start, out), ...])  # near ranges share a request

What a place can do beyond that is a capability of its own: ``Mappable``, ``Shareable``,
``Linkable``, ``Adopting``; ask with ``isinstance``.

A key is not the folder of other keys at the same time ("a" beside "a/b"): keepers that can see it
refuse it. ``sapwood.testing.storage`` checks a keeper against this contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from sapwood.storage.mapped import Mapped

__all__ = [
    "QUIET_SECONDS",
    "Adopting",
    "Descriptor",
    "Draft",
    "Durability",
    "Entry",
    "Keeper",
    "Linkable",
    "Mappable",
    "Pending",
    "Shareable",
    "Syncing",
    "Wanted",
]

QUIET_SECONDS = 3600.0
"""How long a draft must not have changed where a living writer cannot be told from a dead one."""


class Durability(IntEnum):
    """What an object outlives; a later one includes those before."""

    MEMORY = 0
    """Whoever put it, as long as whoever keeps it lives: a process, or a machine's memory."""
    WRITTEN = 1
    """Every process of the machine. After a power cut it may be gone, or be there in part: whoever
    reads it must be able to tell, by a checksum of its own."""
    SYNCED = 2
    """A power cut: it is there whole or not at all, also then."""
    REPLICATED = 3
    """The loss of the machine it was put on."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of an object, and the memory it is to fill."""

    key: str
    start: int
    out: Any
    """A writable, contiguous buffer; its size is the range's."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An object in a list."""

    key: str
    nbytes: int
    changed: float
    """Seconds since the epoch, by the clock of the place."""


class Pending(Protocol):
    """Something that was begun."""

    def wait(self) -> None:
        """Return when it is done; again if it was.

        Raises:
            StorageError: it could not be done, as the call that waits would have said.
        """
        ...

    def close(self) -> None:
        """Its outcome is not wanted. Buffers that were given to it are not touched any more."""
        ...


class Draft(Protocol):
    """An object on its way; for one thread at a time.

    Leaving its ``with`` block discards it, unless it was published.
    """

    @property
    def key(self) -> str:
        """What its name will be."""
        ...

    def write(self, data: Any) -> None:
        """Append bytes; the memory is the caller's again when this returns.

        Raises:
            NoRoom: they do not fit.
            Damaged: they are more than ``begin`` was told.
        """
        ...

    def write_parts(self, parts: Iterable[Any]) -> None:
        """Append many, in as few operations as possible."""
        ...

    def seal(self) -> Pending:
        """Begin to publish, so that several keepers do it side by side; nothing may be added."""
        ...

    def publish(self) -> None:
        """Give it its key; when this returns, it is there and as durable as was asked for.

        If it fails with anything but AlreadyThere or Truncated (an answer that got lost, a sync
        that failed), the object may be there all the same: whole, but not surely durable. Putting
        it again with ``replace=True`` is always right.

        Raises:
            AlreadyThere: there is one, and ``replace`` was not set; this holds against all other
                writers, whatever process or machine they are on.
            Truncated: fewer bytes were written than ``begin`` was told.
            NoRoom: it does not fit.
        """
        ...

    def discard(self) -> None:
        """Forget it, and give its room back; does nothing after ``publish``, or if called again."""
        ...

    def __enter__(self) -> Draft:
        """Discard it at the end of a ``with`` block, unless it was published."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Discard it, unless it was published."""
        ...


class Keeper(Protocol):
    """A place for objects. Calls may come from several threads.

    Every call raises ``BadKey`` before anything is touched, ``Unreachable`` where nobody answers,
    and ``UsageError`` after ``close``.
    """

    @property
    def durability(self) -> Durability:
        """The most it can promise; asking for more is refused with ``ConfigError``."""
        ...

    def begin(
        self,
        key: str,
        nbytes: int | None = None,
        *,
        replace: bool = False,
        durability: Durability | None = None,
    ) -> Draft:
        """Begin an object.

        Args:
            key: its name.
            nbytes: its size, where it is known.
            replace: whether it may take the place of another one.
            durability: what it is to outlive, which decides how its bytes are written from the
                first; by default WRITTEN, or the most the keeper can promise if that is less.

        Raises:
            AlreadyThere: seen this early, before anything is written.
        """
        ...

    def put(
        self,
        key: str,
        parts: Sequence[Any],
        *,
        replace: bool = False,
        durability: Durability | None = None,
    ) -> None:
        """Keep the bytes of some buffers, one after the other, as one object; as ``publish``."""
        ...

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            NotFound: it is not there.
        """
        ...

    def get(self, key: str, *, limit: int = ...) -> bytes:
        """A small object, in one request.

        Raises:
            NotFound: it is not there.
            StorageError: it has more than ``limit`` bytes; none of it was taken into memory.
        """
        ...

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill buffers; near ranges of an object share a request.

        At most a tenth is read beyond what was asked for. If it fails, buffers may have been
        filled in part.

        Raises:
            NotFound: an object is not there.
            Truncated: it ends before a range does.
            StorageError: it was replaced while it was read.
        """
        ...

    def ask(self, wanted: Sequence[Wanted]) -> Pending:
        """The same, begun now and waited for later, so that several keepers work side by side."""
        ...

    def list(self, folder: str = "") -> Iterator[Entry]:
        """The objects whose keys begin with the parts of ``folder``, in the order of keys."""
        ...

    def remove(self, keys: Iterable[str], *, durability: Durability | None = None) -> None:
        """Remove objects, in any order; it is no error if some are not there.

        Whoever is reading one, or has it mapped, goes on, or is told that it is gone. With SYNCED
        they are gone for good when this returns; else a power cut may bring them back.
        """
        ...

    def sweep(self, quiet: float = QUIET_SECONDS) -> int:
        """Remove the drafts of writers that died; how many.

        Drafts of living writers stay: by a lock their process holds, where that can be seen, else
        as long as they were written to in the last ``quiet`` seconds.
        """
        ...

    def close(self) -> None:
        """End what is running, discard drafts; what is kept stays, and so does what is mapped."""
        ...

    def __enter__(self) -> Keeper:
        """Close it at the end of a ``with`` block."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        ...


@runtime_checkable
class Mappable(Protocol):
    """A keeper whose bytes can be had without copying."""

    def map(self, key: str, *, writable: bool = False) -> Mapped:
        """The bytes of an object, valid until they are closed, also after ``remove``.

        Args:
            key: of the object.
            writable: whether they may be written to; what is written is private (copy-on-write)
                and never reaches the object.

        Raises:
            NotFound: it is not there.
            CannotMap: not here, and why; ``read`` works.
        """
        ...


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An open file in which an object lies; whoever asked for it closes it."""

    fd: int
    offset: int
    nbytes: int


@runtime_checkable
class Shareable(Protocol):
    """A keeper whose objects can be passed to other processes, as descriptors."""

    def descriptor(self, key: str) -> Descriptor:
        """Where an object lies; through the descriptor it can be read and mapped, not changed.

        Raises:
            NotFound: it is not there.
            CannotMap: not here, and why.
        """
        ...


@runtime_checkable
class Syncing(Protocol):
    """A keeper that can make objects durable that were put with less."""

    def sync(self, keys: Iterable[str]) -> None:
        """Return when objects would survive a power cut.

        Raises:
            NotFound: one is not there.
        """
        ...


@runtime_checkable
class Linkable(Protocol):
    """A keeper that gives bytes a second key without moving them; each can be removed by itself."""

    def link(self, source: str, key: str, *, durability: Durability | None = None) -> None:
        """Let ``key`` be an object with the bytes of ``source``.

        Raises:
            NotFound: there is no ``source``.
            AlreadyThere: there is such an object.
        """
        ...


@runtime_checkable
class Adopting(Protocol):
    """A keeper that can keep memory where it is."""

    def adopt(
        self,
        key: str,
        memory: Any,
        *,
        replace: bool = False,
        given_back: Callable[[], None] | None = None,
    ) -> None:
        """Keep an object in the caller's memory, which must not change from now on.

        ``given_back`` is called once the object was removed, or the keeper closed, and neither a
        reader nor an array of somebody who mapped it is left; from any thread.

        Raises:
            AlreadyThere: there is one, and ``replace`` is not set; the memory stays the caller's.
        """
        ...
