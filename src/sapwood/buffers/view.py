"""The other side of a segment's descriptor: its bytes, without a way to change them."""

from __future__ import annotations

import fcntl
import os
from types import TracebackType
from typing import Self

from sapwood.buffers.mapping import Access, Bytes, Mapping
from sapwood.errors import StorageError, UsageError

__all__ = ["SegmentView"]

_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)


class SegmentView:
    """Maps a segment that was passed here; its user closes it, or drops it and all views of it.

    The bytes are those the owner has now: whoever reads them has a lease, or they may become
    another model's. Arrays and tensors made from ``part`` keep the memory, also after ``close``.
    """

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        """Takes the descriptor over: it is closed here, also if this fails.

        With ``writable``, a page that is written to is copied first, for this view alone: the
        owner, other views, and another view made from the same descriptor do not see it.

        Raises:
            StorageError: it is not memory that is safe to map: its owner could cut it off, and
                reading it would end this process.
        """
        try:
            nbytes = os.fstat(fd).st_size
            self._check_seals(fd)
            mapping = Mapping(fd, nbytes, Access.COPY if writable else Access.READ)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.writable = writable
        self._bytes: Bytes | None = mapping.bytes

    @staticmethod
    def _check_seals(fd: int) -> None:
        try:
            sealed = fcntl.fcntl(fd, _F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:  # no memfd at all
            sealed = 0
        if not sealed:
            raise StorageError(
                "the descriptor that was passed is not shared memory sealed against shrinking; "
                "it is not mapped, because whoever shrinks it would end this process"
            )

    def part(self, offset: int, nbytes: int) -> memoryview:
        """Some of its bytes; writable if the view is.

        Raises:
            StorageError: the segment ends before.
            UsageError: the view was closed.
        """
        if self._bytes is None:
            raise UsageError("this view of a segment was closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StorageError(
                f"bytes {offset} to {offset + nbytes} were asked for of a segment of {self.nbytes}"
            )
        return self._bytes[offset : offset + nbytes].data

    def close(self) -> None:
        """No more parts; it is unmapped when none of them is left. May be repeated."""
        self._bytes = None

    def __enter__(self) -> Self:
        """It is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
