"""The logs: one per model, of events that are numbered without gaps and never change.

Whoever wants something to happen looks at all events so far, sees whether it may, and puts the next
one under its number, only if there is none. Of any number of writers one wins; the others look at
what it did, and see again whether what they want may still happen. So there are no locks, and
nobody who dies leaves anything half done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sapwood.errors import AlreadyThere, Damaged, NotFound, StorageError, StoreError
from sapwood.repository.objects.layout import (
    LARGEST,
    LOG,
    framed_json,
    log_folder,
    log_key,
    name_of_folder,
    new_token,
    parse_json,
)
from sapwood.repository.objects.view import Event, View
from sapwood.storage import Durability, Keeper

__all__ = ["Journal", "side_by_side"]

_KIND = b"LG"
_PATIENCE = 120.0
"""Seconds until a writer that always finds another one before it gives up."""
_SIDE_BY_SIDE = 8
T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], of: Iterable[T]) -> list[R]:
    """Small requests, several at a time: each of them mostly waits."""
    jobs = list(of)
    if len(jobs) < 2:
        return [work(one) for one in jobs]
    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(jobs)), "sapwood-objects") as pool:
        return list(pool.map(work, jobs))


class Journal:
    """Reads the logs into a view, and appends to them. Owns neither keeper nor view."""

    def __init__(self, keeper: Keeper, view: View) -> None:
        """Nothing is asked before the first call."""
        self._keeper, self._view = keeper, view
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        """The number of the last event that is in the view, by model."""

    # -- reading -----------------------------------------------------------------------------

    def sync(self, name: str) -> int:
        """Take over what is new of a model; the number of its last event.

        Raises:
            Damaged: an event is missing or damaged.
        """
        last = self._last.get(name)
        if last is None:
            self._take(name, [entry.key for entry in self._keeper.list(log_folder(name))])
        else:
            key = log_key(name, last + 1)
            with suppress(NotFound):
                self._apply(name, last + 1, self._keeper.get(key, limit=LARGEST))
                # Whoever has written one event has often written more.
                self._take(name, [entry.key for entry in self._keeper.list(log_folder(name))])
        return self._last[name]

    def sync_all(self) -> None:
        """Take over what is new of all models."""
        for name, keys in self.logs().items():
            self._take(name, keys)

    def logs(self) -> dict[str, list[str]]:
        """The keys of all events in order, by model."""
        found: dict[str, list[str]] = {}
        for entry in self._keeper.list(LOG):
            parts = entry.key.split("/")
            if len(parts) == 3:
                found.setdefault(name_of_folder(parts[1]), []).append(entry.key)
        return found

    def take(self, name: str, keys: list[str]) -> None:
        """Take over the events of a model, given all their keys."""
        self._take(name, keys)

    def _take(self, name: str, keys: list[str]) -> None:
        last = self._last.get(name, 0)
        new = [key for key in sorted(keys) if key > log_key(name, last)]
        for number, key in enumerate(new, last + 1):
            if key != log_key(name, number):
                raise Damaged(f"{log_key(name, number)} is missing, although there is {key}")
        contents = side_by_side(lambda key: self._keeper.get(key, limit=LARGEST), new)
        for number, content in enumerate(contents, last + 1):
            self._apply(name, number, content)
        with self._lock:
            self._last.setdefault(name, 0)

    def _apply(self, name: str, number: int, content: bytes) -> None:
        key = log_key(name, number)
        event = parse_json(_KIND, content, key)
        with self._lock:  # of threads that have read the same one takes it over
            if self._last.get(name, 0) + 1 == number:
                self._view.apply(name, event, key)
                self._last[name] = number

    # -- writing -----------------------------------------------------------------------------

    def append(
        self, name: str, propose: Callable[[], Event], durability: Durability | None = None
    ) -> Event:
        """Let an event happen.

        Args:
            name: of the model.
            propose: the event, by the view as it is; called again when somebody else was first.
            durability: what it must survive.

        Raises:
            StoreError: others were always first; whatever ``propose`` raises.
        """
        deadline, tries = time.monotonic() + _PATIENCE, 0
        while True:
            number = self.sync(name) + 1
            event = {**propose(), "by": new_token()}
            content = framed_json(_KIND, event)
            try:
                self._put(log_key(name, number), content, durability)
            except AlreadyThere:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"others have been writing to {name} all the time for {_PATIENCE:g} s; "
                        "try again"
                    ) from None
                tries += 1
                time.sleep(random.uniform(0, 0.002 * 2 ** min(tries, 7)))
                continue
            self._apply(name, number, content)
            return event

    def _put(self, key: str, content: bytes, durability: Durability | None) -> None:
        try:
            self._keeper.put(key, [content], durability=durability)
        except StorageError as error:
            # It may be there all the same: the answer got lost, and a second try found the first.
            found = b""
            with suppress(StorageError):
                found = self._keeper.get(key, limit=LARGEST)
            lost = isinstance(error, AlreadyThere) or (durability or 0) <= Durability.WRITTEN
            if found != content or not lost:
                raise
