"""The other ranks of this machine: messages from all of them, on one thread that waits."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from sapwood.runtime.machines import Links
from sapwood.sync.averaging.messages import Kind, Message, receive, send

__all__ = ["Neighbours"]

log = logging.getLogger(__name__)


class Neighbours:
    """Owns the links, and the thread that reads them and acts on what came."""

    def __init__(
        self,
        links: Links,
        received: Callable[[int, Message], None],
        progress: Callable[[], None],
        lost: Callable[[int, Exception], None],
    ) -> None:
        """All three are called on the thread.

        Args:
            links: a connection to each other rank.
            received: takes one message.
            progress: called after the messages that were there, and after ``wake``.
            lost: told of a rank whose connection ended without a farewell, or of any other error.
        """
        self._links = links
        self._received = received
        self._progress = progress
        self._lost = lost
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._by_fd = {link.fileno(): (rank, link) for rank, link in links}
        self._left: set[int] = set()
        self._closing = False
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sapwood-sum", daemon=True)
        self._thread.start()

    def tell(self, message: Message, timeout: float) -> None:
        """Send to every neighbour.

        Raises:
            DeadlineError: one of them has not read for ``timeout`` seconds.
            OSError: one of them is gone.
        """
        with self._sending:
            for rank, link in self._links:
                if rank in self._left:
                    raise ConnectionResetError(f"rank {rank} has left")
                send(link, message, timeout)

    def wake(self) -> None:
        """Let the thread call ``progress``."""
        os.eventfd_write(self._wake, 1)

    def close(self, farewell: Message) -> None:
        """Say ``farewell`` to whoever is still there, and end."""
        if self._closing:
            return
        self._closing = True
        for _, link in self._links:
            with suppress(OSError, TimeoutError):
                send(link, farewell, 0.0)
        self.wake()
        self._thread.join(5.0)
        self._links.close()
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd in self._by_fd:
            poller.register(fd, select.POLLIN)
        rank = -1
        try:
            while not self._closing:
                for fd, _ in poller.poll(60_000):
                    if fd == self._wake:
                        with suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                        continue
                    rank = self._by_fd[fd][0]
                    if not self._read(fd):
                        poller.unregister(fd)
                self._progress()
        except Exception as error:
            if not self._closing:
                log.debug("averaging inside the machine failed", exc_info=True)
                self._lost(rank, error)

    def _read(self, fd: int) -> bool:
        """Take every message that is there; False when nothing can come any more."""
        rank, link = self._by_fd[fd]
        while True:
            try:
                message = receive(link)
            except BlockingIOError:
                return True
            except (EOFError, OSError) as error:
                if rank not in self._left and not self._closing:
                    reason = f"rank {rank}'s connection on this machine ended"
                    self._lost(rank, ConnectionResetError(f"{reason} {error}".strip()))
                return False
            if message.kind is Kind.LEAVING:
                self._left.add(rank)
            else:
                self._received(rank, message)
