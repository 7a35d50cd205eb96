"""A place that has no room left: told apart from other failures, because something can be done."""

from __future__ import annotations

import errno
from typing import Protocol, runtime_checkable

from sapwood.errors import TierError
from sapwood.tiers.record import CheckpointId

__all__ = ["Abandonable", "NoRoomError", "tier_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
    kind = NoRoomError if error.errno in _FULL else TierError
    return kind(f"{doing}: {error.strerror or error}")
