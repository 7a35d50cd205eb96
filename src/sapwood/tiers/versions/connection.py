"""A repository that is open as long as somebody needs it, so that nobody need close it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sapwood.errors import TierError
from sapwood.repository.base import Backend
from sapwood.repository.folder import CATALOG, is_repository
from sapwood.repository.opening import is_folder, open_backend
from sapwood.storage import Durability

__all__ = ["Connection"]

log = logging.getLogger(__name__)
Mark = tuple[int, int] | None


class Connection:
    """Opens a back end at first use. Owns it until nobody uses it, or until ``close``."""

    def __init__(self, place: str) -> None:
        """Nothing is opened yet."""
        self._place = place
        self._lock = threading.Lock()
        self._users = 0
        self._stays = False
        self._backend: Backend | None = None
        self._most = Durability.WRITTEN
        self._mark: Mark = None

    @property
    def durability(self) -> Durability:
        """What is kept outlives a power cut, if the place can promise that."""
        return min(self._most, Durability.SYNCED)

    def stay(self) -> None:
        """Keep it open from the next use on: there is work in the background."""
        self._stays = True

    @contextmanager
    def using(self, *, create: bool = False) -> Iterator[Backend | None]:
        """The back end; None if there is no repository and none is to be made.

        Raises:
            TierError, ConfigError, StoreError: it cannot be opened.
        """
        backend = self.hold(create=create)
        try:
            yield backend
        finally:
            if backend is not None:
                self.release()

    def hold(self, *, create: bool = False) -> Backend | None:
        """The same, until ``release``."""
        with self._lock:
            self._leave_removed()
            if self._backend is None:
                if not create and is_folder(self._place) and not _is_there(self._place):
                    return None
                self._backend, self._most = open_backend(self._place, create=create)
                self._mark = _mark_of(self._place)
            self._users += 1
            return self._backend

    def _leave_removed(self) -> None:
        """Somebody has removed the folder: what is written to open files there is lost."""
        if self._backend is not None and not self._users and self._mark != _mark_of(self._place):
            log.warning("the repository %s was removed, or replaced by another", self._place)
            self._close()

    def release(self) -> None:
        """A user is done."""
        with self._lock:
            self._users -= 1
            if not self._users and not self._stays:
                self._close()

    def close(self) -> None:
        """Close it; shards that are still being read cannot be read any more."""
        with self._lock:
            self._stays = False
            self._close()

    def _close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


def _mark_of(place: str) -> Mark:
    """By what a catalog is known to be the very one that was opened."""
    try:
        facts = (Path(place) / CATALOG).stat() if is_folder(place) else None
    except OSError:
        return None
    return None if facts is None else (facts.st_dev, facts.st_ino)


def _is_there(place: str) -> bool:
    try:
        return is_repository(Path(place))
    except OSError as error:
        raise TierError(f"cannot look at {place}: {error.strerror or error}") from error
