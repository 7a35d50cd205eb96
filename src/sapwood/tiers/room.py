"""A place that has no room left: told apart from other failures, because something can be done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from sapwood.errors import NoRoom, StorageError, TierError
from sapwood.storage.room import is_full
from sapwood.tiers.record import CheckpointId

__all__ = ["Abandonable", "NoRoomError", "as_tier_errors", "tier_error"]


class NoRoomError(TierError):
    """The device, or the quota, is full: trying again helps once something was removed."""


@runtime_checkable
class Abandonable(Protocol):
    """A tier in which shards that come without those of other ranks take room for nothing."""

    def abandon(self, id: CheckpointId) -> None:
        """Remove what is here of a checkpoint that will never be whole; one that is whole stays.

        Raises:
            TierError: it could not be done now.
        """
        ...


def tier_error(doing: str, error: OSError) -> TierError:
    """What the system gave, as an error of a tier."""
    kind = NoRoomError if is_full(error) else TierError
    return kind(f"{doing}: {error.strerror or error}")


@contextmanager
def as_tier_errors() -> Iterator[None]:
    """Raise what a keeper says as an error of a tier; decorates methods as well."""
    try:
        yield
    except StorageError as error:
        kind = NoRoomError if isinstance(error, NoRoom) else TierError
        raise kind(str(error)) from error
