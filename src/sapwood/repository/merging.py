"""Hashing what was saved, in the background, and merging tensors that are equal.

A save does not wait for it: bytes are written first. A process that ends before all is hashed
leaves the rest to the next one that opens the repository.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from sapwood.errors import NotFound, SapwoodError
from sapwood.repository.catalog import Catalog, Place
from sapwood.storage import Keeper, Wanted

__all__ = ["Merger", "digest_of", "mark_of"]

log = logging.getLogger(__name__)
_BATCH = 64
_BLOCK = 4 * 2**20


class Merger:
    """One thread that hashes blobs nobody has hashed yet; ``close`` ends it between two blobs."""

    def __init__(self, catalog: Catalog, keeper: Keeper) -> None:
        """Nothing runs before ``wake``."""
        self._catalog, self._keeper = catalog, keeper
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._closed = False
        self._missed: set[Place] = set()

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

    def _run(self) -> None:
        try:
            while self._goes_on():
                self._missed.clear()
                batch = self._catalog.unhashed(_BATCH)
                while batch and not self._closed:
                    self._catalog.hashed(self._hash(batch))
                    batch = self._catalog.unhashed(_BATCH)
        except SapwoodError as error:
            # What is not merged takes room and is as right; the next process tries again.
            log.warning("equal tensors are not merged for now: %s", error)

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
            try:
                found.append((place.blob, *self._digests(place)))
            except NotFound:
                # Removed, or moved by gc, since the batch was listed: the next list knows. One that
                # is listed there again is missing.
                if place in self._missed:
                    raise
                self._missed.add(place)
        return found

    def _digests(self, place: Place) -> tuple[bytes, bytes]:
        strong, fast = _strong(), _fast()
        block = memoryview(bytearray(min(place.nbytes, _BLOCK)))
        for at in range(0, place.nbytes, _BLOCK):
            part = block[: min(_BLOCK, place.nbytes - at)]
            self._keeper.read([Wanted(place.pack, place.start + at, part)])
            strong.update(part)
            fast.update(part)
        return strong.digest(), fast.digest()


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


def _strong() -> Any:
    return hashlib.sha256()


_fast: Callable[[], Any]
try:
    import xxhash
except ModuleNotFoundError:
    _fast = lambda: hashlib.blake2b(digest_size=16)  # noqa: E731
else:
    _fast = xxhash.xxh3_128
