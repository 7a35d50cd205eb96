"""A place that has no room left: told apart from other failures, because something can be done."""

from __future__ import annotations

import errno

from sapwood.errors import NoRoom, StorageError

__all__ = ["is_full", "storage_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether the device or the quota is full."""
    return error.errno in _FULL


def storage_error(doing: str, error: OSError) -> StorageError:
    """What the system gave, as an error of a keeper."""
    kind = NoRoom if is_full(error) else StorageError
    return kind(f"{doing}: {error.strerror or error}")
