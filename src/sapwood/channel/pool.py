"""Connections to one server that are used again, by any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sapwood.channel.connection import ChannelError, Connection

__all__ = ["Pool"]


class Pool:
    """Dials when all connections are in use, and keeps some that are idle.

    Owns its connections; ``close`` ends also those in use, which wakes whoever waits on them.
    """

    def __init__(self, dial: Callable[[float | None], Connection], *, idle: int = 4) -> None:
        """Nothing is connected yet; ``dial`` takes the seconds it may last, None for the usual."""
        self._dial, self._limit = dial, idle
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def connection(
        self, *harmless: type[Exception], timeout: float | None = None
    ) -> Iterator[Connection]:
        """A connection for one exchange; it is used again only if that went well.

        ``harmless`` exceptions leave the connection in order: the server answered with an error.
        ``timeout``: seconds until there is one, if not the usual.
        """
        connection = self.take(timeout)
        try:
            yield connection
        except harmless:
            self.give_back(connection)
            raise
        except BaseException:
            self.discard(connection)
            raise
        self.give_back(connection)

    def take(self, timeout: float | None = None) -> Connection:
        """A connection that is the caller's until ``give_back`` or ``discard``.

        Raises:
            OSError: the server cannot be reached, or the pool is closed.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise ChannelError("the connection was closed on this side")
                if not self._idle:
                    break
                connection = self._idle.pop()
                self._used.add(connection)
            if not connection.stale:
                return connection
            self.discard(connection)
        return self._dialled(timeout)

    def _dialled(self, timeout: float | None) -> Connection:
        connection = self._dial(timeout)
        with self._lock:
            if not self._closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ChannelError("the connection was closed on this side")

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that is idle and in order for the next exchange."""
        with self._lock:
            self._used.discard(connection)
            if len(self._idle) < self._limit and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: Connection) -> None:
        """Close a connection whose exchange did not end."""
        with self._lock:
            self._used.discard(connection)
        connection.close()

    def close(self) -> None:
        """End all connections. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                connection.abort()  # closed by whoever uses it
        for connection in idle:
            connection.close()
