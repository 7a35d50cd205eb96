"""Hashing what was saved, in the background, and merging tensors that are equal.

A save does not wait for it: bytes are written first. A process that ends before all is hashed
leaves the rest to the next one that opens the repository.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sapwood.errors import Damaged, Gone, NotFound, SapwoodError, StorageError, Truncated
from sapwood.repository.catalog import Catalog, Place
from sapwood.runtime.forks import ForkLock
from sapwood.storage import Keeper, Wanted
from sapwood.storage.base import Syncing

__all__ = ["Merger", "digest_of", "mark_of", "plain_mark_of", "strong_hash", "sync"]

log = logging.getLogger(__name__)
_BATCH = 64
_BLOCK = 4 * 2**20


_MERGERS: weakref.WeakSet[Merger] = weakref.WeakSet()


class Merger:
    """One thread that hashes blobs nobody has hashed yet; ``close`` ends it between two blobs."""

    def __init__(
        self, catalog: Catalog, keeper: Keeper, whole: Callable[[Place], memoryview]
    ) -> None:
        """Nothing runs before ``wake``; ``whole`` reads a blob, whatever form it is in."""
        self._catalog, self._keeper, self._whole = catalog, keeper, whole
        self._lock = ForkLock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._closed = False
        self._gone: set[str] = set()
        _MERGERS.add(self)

    def wake(self) -> None:
        """There is something to hash."""
        with self._lock:
            self._again = True
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="sapwood-merge", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Return when all is hashed."""
        self.wake()
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def close(self) -> None:
        """End after the blob that is being hashed. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def inherit(self) -> None:
        """In a child: the thread is the parent's."""
        self._thread = None

    def _run(self) -> None:
        try:
            while self._goes_on():
                self._gone.clear()
                batch = self._catalog.unhashed(_BATCH)
                while batch and not self._closed:
                    found = self._hash(batch)
                    if not found and not self._closed:
                        log.warning("%d tensors cannot be hashed, as they are gone", len(batch))
                        break
                    self._note(found)
                    batch = self._catalog.unhashed(_BATCH)
        except SapwoodError as error:
            # What is not merged takes room and is as right; the next process tries again.
            log.warning("equal tensors are not merged for now: %s", error)

    def _note(self, found: list[tuple[int, bytes, bytes]]) -> None:
        damaged = self._damaged(self._catalog.twins(digest for _, digest, _ in found))
        while packs := self._catalog.hashed(found, damaged):
            try:
                sync(self._catalog, self._keeper, packs)
            except NotFound:  # moved by gc meanwhile, or missing if it is so again
                if self._gone.intersection(packs):
                    raise
                self._gone.update(packs)
                return

    def _goes_on(self) -> bool:
        with self._lock:
            goes_on, self._again = self._again and not self._closed, False
            if not goes_on:
                self._thread = None
            return goes_on

    def _hash(self, batch: list[Place]) -> list[tuple[int, bytes, bytes]]:
        found = []
        for place in batch:
            if self._closed:
                break
            with suppress(NotFound):  # moved or removed by gc: the next look at the catalog tells
                found.append((place.blob, *self._digests(place)))
        return found

    def _damaged(self, twins: Mapping[bytes, Place]) -> set[int]:
        """Those whose bytes are not what they were: what is equal to them mends them instead.

        To merge into such a one would lose the only sound copy there is.
        """
        return {place.blob for digest, place in twins.items() if not self._is_sound(place, digest)}

    def _is_sound(self, place: Place, digest: bytes) -> bool:
        try:
            data = self._whole(place)
        except (NotFound, Gone):
            return True  # moved or removed since
        except Damaged:
            return False
        except StorageError as error:
            return not isinstance(error, Truncated)
        # Another process may have made its marks in another way.
        return mark_of(data) == place.mark or digest_of(data) == digest

    def _digests(self, place: Place) -> tuple[bytes, bytes]:
        strong, fast = _strong(), _fast()
        block = memoryview(bytearray(min(place.nbytes, _BLOCK)))
        for at in range(0, place.nbytes, _BLOCK):
            part = block[: min(_BLOCK, place.nbytes - at)]
            self._keeper.read([Wanted(place.pack, place.start + at, part)])
            strong.update(part)
            fast.update(part)
        return strong.digest(), fast.digest()


def _in_child() -> None:
    for merger in list(_MERGERS):
        merger.inherit()


os.register_at_fork(after_in_child=_in_child)


def sync(catalog: Catalog, keeper: Keeper, packs: Sequence[str]) -> None:
    """Make packs survive a power cut.

    Raises:
        NotFound: one of them is not there any more.
    """
    if not packs:
        return
    if isinstance(keeper, Syncing):
        keeper.sync(packs)
    catalog.synced(packs)


def strong_hash() -> Any:
    """What ``digest_of`` uses, for bytes that come in blocks."""
    return _strong()


def digest_of(data: Any) -> bytes:
    """What makes two runs of bytes equal: no two others were ever found to have the same."""
    found = _strong()
    found.update(data)
    return bytes(found.digest())


def mark_of(data: Any) -> bytes:
    """A checksum that is as fast as memory, to notice damage."""
    found = _fast()
    found.update(data)
    return bytes(found.digest())


def plain_mark_of(data: Any) -> bytes:
    """The same, as it is where xxhash is not installed."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _strong() -> Any:
    return hashlib.sha256()


_fast: Callable[[], Any]
try:
    import xxhash
except ModuleNotFoundError:
    _fast = lambda: hashlib.blake2b(digest_size=16)  # noqa: E731
else:
    _fast = xxhash.xxh3_128
