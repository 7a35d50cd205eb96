"""The other ranks of this machine: messages from all of them, on one thread that waits."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from sapwood.runtime.machines import Links
from sapwood.sync.averaging.messages import Kind, Message, receive, send

__all__ = ["Neighbours"]

log = logging.getLogger(__name__)

_END = 5.0


class Neighbours:
    """Owns the links, and the thread that reads them and acts on what came."""

    def __init__(
        self,
        links: Links,
        received: Callable[[int, Message], None],
        progress: Callable[[], None],
        lost: Callable[[int, Exception], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """All four are called on the thread.

        Args:
            links: a connection to each other rank.
            received: takes one message.
            progress: called after the messages that were there, and after ``wake``.
            lost: told of a rank whose connection ended without a farewell.
            failed: told of any other error, which ends the thread: it is this rank's own.
        """
        self._links = links
        self._received = received
        self._progress = progress
        self._lost = lost
        self._failed = failed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._by_fd = {link.fileno(): (rank, link) for rank, link in links}
        self._left: set[int] = set()
        self._ended: set[int] = set()
        self._closing = False
        self._given_up = False
        self._sending = threading.Lock()
        self._backlog: dict[int, deque[Message]] = {fd: deque() for fd in self._by_fd}
        """By descriptor: what a full connection did not take yet; the thread sends it."""
        self._thread = threading.Thread(target=self._run, name="sapwood-sum", daemon=True)
        self._thread.start()

    def tell(self, message: Message) -> None:
        """Send to every neighbour, without ever waiting for one.

        The thread that reads also tells: if it waited for a neighbour to read, two of them could
        wait for each other. And whoever is gone need not be told: the reader knows whether that
        rank died, or had done its part and left.
        """
        full = False
        with self._sending:
            for fd, (_, link) in self._by_fd.items():
                waiting = self._backlog[fd]
                if fd in self._ended:
                    continue
                if waiting or not _sent(link, message):
                    waiting.append(message)
                    full = True
        if full:
            self.wake()

    def left(self, rank: int) -> bool:
        """Whether ``rank`` has taken leave."""
        return rank in self._left

    def wake(self) -> None:
        """Let the thread call ``progress``."""
        os.eventfd_write(self._wake, 1)

    def close(self, farewell: Message, patience: float) -> None:
        """Say ``farewell`` to whoever is still there, and end.

        What a full connection has not taken yet is waited for: others need it to end their part.
        """
        if self._closing:
            return
        self._closing = True
        self.tell(farewell)
        self.wake()
        if threading.current_thread() is not self._thread:  # else the collector found us here
            self._thread.join(patience)
        self._given_up = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END)
        self._links.close()
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd in self._by_fd:
            poller.register(fd, select.POLLIN)
        try:
            while not self._closing or (any(self._backlog.values()) and not self._given_up):
                for fd, _ in poller.poll(60_000):
                    if fd == self._wake:
                        with suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                        continue
                    if not self._read(fd):
                        poller.unregister(fd)
                        with self._sending:
                            self._ended.add(fd)
                            self._backlog[fd].clear()
                self._progress()
                for fd in self._by_fd.keys() - self._ended:
                    poller.modify(fd, select.POLLIN | (select.POLLOUT if self._owes(fd) else 0))
        except Exception as error:
            if not self._closing:
                log.debug("averaging inside the machine failed", exc_info=True)
                self._failed(error)

    def _owes(self, fd: int) -> bool:
        """Send what a connection did not take before; whether some of it is still here."""
        waiting = self._backlog[fd]
        with self._sending:
            while waiting and _sent(self._by_fd[fd][1], waiting[0]):
                waiting.popleft()
            return bool(waiting)

    def _read(self, fd: int) -> bool:
        """Take every message that is there; False when nothing can come any more."""
        rank, link = self._by_fd[fd]
        while True:
            try:
                message = receive(link)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # It closed without reading all of ours; what it had sent before is still here,
                # and may end with a farewell. The kernel reports this only once.
                continue
            except (EOFError, OSError) as error:
                if rank not in self._left and not self._closing:
                    reason = f"rank {rank}'s connection on this machine ended"
                    self._lost(rank, ConnectionResetError(f"{reason} {error}".strip()))
                return False
            if message.kind is Kind.LEAVING:
                self._left.add(rank)
            else:
                self._received(rank, message)


def _sent(link: socket.socket, message: Message) -> bool:
    """Whether the message is on its way, or nobody is there to get it."""
    try:
        send(link, message)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
