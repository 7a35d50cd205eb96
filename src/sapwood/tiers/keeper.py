"""The contract of a keeper: whoever keeps blobs for a tier, in a folder here or on another node.

A blob is a run of bytes and a record, both of which the tier alone understands. It is there whole
or not at all: the record comes last, and makes it be there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sapwood.errors import CheckpointError

__all__ = ["Blob", "Keeper", "Pending", "Sink", "checked", "is_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True, order=True)
class Blob:
    """The name of a blob."""

    area: str
    """The tier it belongs to."""
    group: str
    """The checkpoint it belongs to; a group is dropped as a whole."""
    name: str


class Sink(Protocol):
    """A blob on its way to a keeper. Every call raises ``TierError`` if it cannot go on."""

    def write(self, data: Any) -> None:
        """Give the next bytes."""
        ...

    def seal(self, record: bytes) -> None:
        """All bytes were given, and this is the record."""
        ...

    def wait(self) -> None:
        """Return when the blob is durable."""
        ...

    def close(self) -> None:
        """Give back what is in use; a blob that is not durable by now is forgotten."""
        ...


class Pending(Protocol):
    """Bytes that were asked for."""

    def into(self, out: Any) -> None:
        """Wait for them; ``out`` has exactly their size.

        Raises:
            CheckpointError: they are not there.
            TierError: the keeper cannot be reached now.
        """
        ...

    def close(self) -> None:
        """They are not wanted any more; needed only where ``into`` was not called."""
        ...


class Keeper(Protocol):
    """Somebody who keeps blobs. Every call raises ``TierError`` if the keeper cannot answer now."""

    def put(self, blob: Blob, nbytes: int) -> Sink:
        """Begin to keep a blob of this size, in place of an older one of that name."""
        ...

    def names(self, area: str, group: str = "") -> Sequence[Blob]:
        """The blobs of an area, or of one group of it, in order."""
        ...

    def size(self, blob: Blob) -> int:
        """Bytes without the record.

        Raises:
            CheckpointError: it is not there.
        """
        ...

    def record(self, blob: Blob) -> bytes:
        """The record.

        Raises:
            CheckpointError: it is not there.
        """
        ...

    def ask(self, blob: Blob, start: int, nbytes: int) -> Pending:
        """Ask for bytes; asking several keepers before waiting makes them work side by side."""
        ...

    def drop(self, area: str, group: str) -> None:
        """Remove a group; it is no error if it is not there."""
        ...

    def close(self) -> None:
        """End what is running; what is kept stays."""
        ...


def checked(text: object) -> str:
    """A name that is safe as a file's name.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(text, str) or not is_name(text):
        raise CheckpointError(f"{text!r} is no name of a blob, an area or a group")
    return text


def is_name(text: str) -> bool:
    """Whether a text is safe as a file's name."""
    return _NAME.fullmatch(text) is not None
