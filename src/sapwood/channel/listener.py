"""The accept loop of everything that listens: proof first, with limits that hold before it.

A stranger can hold a place only for the seconds of a greeting, and never keeps others out: when all
places of the unproven are taken, the one that came first loses its place to the newcomer. Who
loses it without fault comes again (``dial``).
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.handshake import Refused, greet_client
from sapwood.errors import ConfigError

__all__ = ["Limits", "Listener", "bind_tcp", "bind_unix"]

log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_BACKLOG = 128
_SILENCE = 10.0
"""Seconds between two warnings of refused clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may take."""

    unproven: int = 256
    """Connections that have not shown the token yet; one more ends the oldest of them."""
    greeting: float = 5.0
    """Seconds to show the token."""
    proven: int = 1024
    """Connections beyond are told to try later."""
    timeout: float = 10.0
    """Seconds a proven client may take for a block or an answer."""


def bind_tcp(host: str, port: int = 0) -> socket.socket:
    """Listen on one address; "" is every interface.

    Raises:
        ConfigError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def bind_unix(name: str) -> socket.socket:
    """Listen on a Unix socket; a name that begins with a zero byte leaves nothing on disk.

    Raises:
        ConfigError: it cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {name!r}: {error.strerror or error}") from error
    return listener


class Listener:
    """Accepts, greets and serves, each client on a thread of its own, until closed.

    Owns the listening socket, its thread, and every connection it has accepted.

    Args:
        sock: what to accept from; see ``bind_tcp`` and ``bind_unix``.
        token_of: the token for a ``handshake.key_of``, None if it is not known; for each client.
        serve: called with a proven connection; when it returns the connection is closed.
        name: of the threads and in log lines.
        limits: what clients may take.
        tls: encrypts every connection, if given.
        admit: looks at a new socket before anything is said, and raises ``Refused``.
    """

    def __init__(
        self,
        sock: socket.socket,
        token_of: Callable[[str], str | None],
        serve: Callable[[Connection], None],
        *,
        name: str,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        admit: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        """Begin to accept."""
        self.name = name
        self._sock, self._token_of, self._serve = sock, token_of, serve
        self._limits = limits or Limits()
        self._tls, self._admit = tls, admit
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, threading.Thread] = {}
        self._displaced: dict[socket.socket, threading.Thread] = {}
        self._proven: dict[Connection, threading.Thread] = {}
        self._closed = False
        self._silent_until, self._unsaid = 0.0, 0
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            sock.close()
            raise ConfigError(
                f"{name} cannot listen: {error}; raise the limit of threads (ulimit -u)"
            ) from error

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._sock.getsockname()[1])

    @property
    def address(self) -> str:
        """``host:port``, as others must be told."""
        host, port = self._sock.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """End the loop, every connection and every thread. Calling it again does nothing."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            self._closed = True
            threads = [*self._unproven.values(), *self._displaced.values(), *self._proven.values()]
            # Their threads close them, but not while they are in these tables: nobody else's
            # descriptor can have the number yet.
            for stranger in (*self._unproven, *self._displaced):
                _end(stranger)
            for client in self._proven:
                client.abort()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *threads):
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        self._sock.close()

    # -- the accept loop ---------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            sock = None
            try:
                sock, _ = self._sock.accept()
                if self._tls is not None:
                    sock = self._tls.wrap_socket(
                        sock, server_side=True, do_handshake_on_connect=False
                    )
                self._welcome(sock)
            except (OSError, RuntimeError) as error:
                if sock is not None:
                    sock.close()
                self._pause(error)

    def _pause(self, error: Exception) -> None:
        """Out of descriptors or threads, which passes; unless it is the end."""
        if not self._closed:
            self._warn(f"a client could not be served: {error}")
            time.sleep(0.05)

    def _welcome(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._attend, args=(sock,), name=self.name, daemon=True)
        with self._lock:
            if self._closed:
                sock.close()
                return
            if len(self._unproven) >= self._limits.unproven:
                oldest = next(iter(self._unproven))
                self._displaced[oldest] = self._unproven.pop(oldest)
                _end(oldest)  # its thread wakes and closes it
            self._unproven[sock] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._unproven[sock]
                raise

    # -- a thread per client -----------------------------------------------------------------

    def _attend(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            sock.settimeout(self._limits.greeting)
            self._admit(sock)
            connection = Connection(sock, timeout=self._limits.timeout)
            if self._greet(sock, connection):
                self._serve(connection)
        except Refused as error:
            self._warn(f"a client was refused: {error}")
        except OSError as error:
            log.debug("%s: a client is gone: %s", self.name, error)
        except Exception:
            # One client must not end the service for the others.
            log.exception("%s: a client was dropped", self.name)
        finally:
            with self._lock:
                self._unproven.pop(sock, None)
                self._displaced.pop(sock, None)
                if connection is not None:
                    self._proven.pop(connection, None)
            if connection is not None:
                connection.close()
            sock.close()

    def _warn(self, what: str) -> None:
        """Say it, but let no stranger fill the log."""
        with self._lock:
            self._unsaid += 1
            if time.monotonic() < self._silent_until:
                return
            self._silent_until = time.monotonic() + _SILENCE
            more, self._unsaid = self._unsaid - 1, 0
        log.warning("%s: %s%s", self.name, what, f" (and {more} before)" if more else "")

    def _greet(self, sock: socket.socket, connection: Connection) -> bool:
        """Whether it has shown the token and there is room for it."""
        deadline = time.monotonic() + self._limits.greeting
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        room = False

        def admit() -> None:
            nonlocal room
            room = self._admitted(sock, connection)

        left = deadline - time.monotonic()
        greet_client(connection, self._token_of, seconds=left, admit=admit)
        if not room:
            connection.send({"error": f"all {self._limits.proven} connections are in use"})
        return room

    def _admitted(self, sock: socket.socket, connection: Connection) -> bool:
        """Move a client from the unproven to the proven; False if there is no room.

        Before it is told that it has come in: from then on no stranger takes its place.

        Raises:
            ChannelError: it has lost its place already.
        """
        with self._lock:
            thread = self._unproven.pop(sock, None)
            if thread is None or self._closed:
                raise ChannelError("it was cut off before it had shown the token")
            room = len(self._proven) < self._limits.proven
            if room:
                self._proven[connection] = thread
            else:
                self._displaced[sock] = thread
        return room


def _end(sock: socket.socket) -> None:
    """Wake the thread that serves it; only that thread closes it."""
    with suppress(OSError):
        # Not SSLSocket's own method, which takes the TLS state away under that thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
