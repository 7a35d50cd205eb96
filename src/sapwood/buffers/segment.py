"""A segment: unnamed shared memory that grows in place, and that only its maker can write to."""

from __future__ import annotations

import fcntl
import os

from sapwood.buffers.arena import Arena
from sapwood.errors import StorageError

__all__ = ["Segment"]

_F_SEAL_FUTURE_WRITE = 0x0010
_UNSUPPORTED = "shared memory cannot be protected from those it is passed to: that takes Linux 5.1"


class Segment(Arena):
    """Addresses and a file of ``nbytes``, of which the first ``ready`` have pages.

    Growing gives more of it pages: runs on both sides of where it ended are one run, and whoever
    mapped the descriptor before sees the new bytes, too.
    """

    def __init__(self, nbytes: int, *, label: str) -> None:
        """No page of it is there yet.

        Raises:
            OSError: as the system gives it.
            StorageError: whoever receives the descriptor could write to it.
        """
        super().__init__(nbytes, label=label, touch=False)
        self.ready = 0
        self.huge = 0
        """How much of it is in huge pages."""
        try:
            self._seal()
        except BaseException:
            self.close()
            raise

    def _seal(self) -> None:
        """Fix the size, and make the descriptor read-only for everybody but this mapping.

        F_SEAL_WRITE is not for memory that is used again: the kernel refuses it as long as a
        writable mapping exists, and nothing could be written after it. F_SEAL_FUTURE_WRITE leaves
        the mapping that is there, and refuses write(), new writable mappings and punched holes to
        whoever has the descriptor, this process included. What it does not say is that the bytes
        no longer change: that is what leases are for.
        """
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            raise StorageError(_UNSUPPORTED) from error

    def grow(self, nbytes: int, *, huge: bool = True) -> None:
        """Give pages to as much more; only one thread at a time may do so.

        Raises:
            OSError: there is no memory left. ``ready`` is what it was.
        """
        assert self._mapping is not None
        stop = self.ready + nbytes
        self.huge += self._mapping.fault_in(self.fd, self.ready, stop, huge=huge)
        self.ready = stop

    def make_private(self) -> None:
        """In a forked child: writes no longer reach the pool this was inherited from."""
        if self._mapping is not None:
            self._mapping.make_private(self.fd)

    @property
    def address(self) -> int:
        """Where it begins in this process's memory."""
        assert self._mapping is not None
        return self._mapping.address

    @property
    def resident(self) -> int:
        """Bytes of memory it takes, as the system counts them."""
        return os.fstat(self.fd).st_blocks * 512
