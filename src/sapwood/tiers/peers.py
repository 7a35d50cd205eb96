"""The server an engine runs for the other nodes: it keeps their blobs and gives them back.

How an engine wires it up, once per node:

    folder = peer_folder(specs, nodes)                  # None: no tier needs other nodes
    server = PeerServer(folder, token).start()          # binds; the port is known from here on
    nodes = replace(nodes, addresses={...}, token=token)  # after telling each other ``address``
    tiers = make_tiers(specs, nodes)
    ...
    server.close()

The token must be the same on all nodes and known to nobody else. What was kept outlives the
server: a new one on the same folder gives it back, under whatever address it then has.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.runtime.wire import Connection, Refused, WireError
from sapwood.tiers.answers import Answers
from sapwood.tiers.blobs import BlobFolder

__all__ = ["PeerServer"]

log = logging.getLogger(__name__)
_IDLE_SECONDS = 600.0
"""A client that wants nothing for so long is sent away; it comes back when it wants something."""
_CLOSE_SECONDS = 5.0


class PeerServer:
    """Keeps blobs in a folder for whoever knows the token.

    Args:
        folder: where blobs rest.
        token: the shared secret.
        host: the address to listen on; other machines reach only one of their network.
        port: 0 lets the system choose.
        timeout: seconds a client may take for the next block or answer.
        connections: how many clients at a time; more are sent away with a message.
    """

    def __init__(
        self,
        folder: Path,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 10.0,
        connections: int = 1024,
    ) -> None:
        """Nothing listens before ``start``."""
        if not token:
            raise ConfigError("a peer server needs a token: anybody could read checkpoints from it")
        self._answers = Answers(BlobFolder(folder))
        self._token, self._timeout, self._limit = token, timeout, connections
        self._where = (host, port)
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._clients: dict[Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> str:
        """``host:port``, as the others must be told."""
        assert self._listener is not None, "start() comes first"
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> PeerServer:
        """Listen, and serve on threads of its own.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = self._where
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
        self._accepting = threading.Thread(target=self._accept, name="sapwood-peers", daemon=True)
        self._accepting.start()
        return self

    def close(self) -> None:
        """End all connections and threads; what is kept stays. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            clients = dict(self._clients)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join(_CLOSE_SECONDS)
        if self._listener is not None:
            self._listener.close()
        for connection in clients:
            connection.abort()
        for thread in clients.values():
            thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> PeerServer:
        """Start, and close at the end of a ``with`` block."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # -- on the threads ----------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._pause()
                continue
            try:
                self._welcome(Connection(sock, timeout=self._timeout))
            except (OSError, RuntimeError) as error:
                log.warning("a client of the peer server could not be served: %s", error)
                sock.close()
                self._pause()

    def _pause(self) -> None:
        """Out of descriptors or threads, which passes; unless it is the end."""
        if not self._closed:
            time.sleep(0.05)

    def _welcome(self, connection: Connection) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="sapwood-peer", daemon=True
        )
        with self._lock:
            room = len(self._clients) < self._limit and not self._closed
            if room:
                thread.start()
                self._clients[connection] = thread
        if not room:
            with suppress(OSError):
                connection.send({"error": f"all {self._limit} connections are in use; try later"})
            connection.close()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.accept_from(self._token)
            while True:
                self._answers.answer(connection, connection.receive(timeout=_IDLE_SECONDS))
        except Refused:
            log.warning("a client of the peer server was refused: it does not know the token")
        except WireError as error:
            log.debug("a client of the peer server was sent away: %s", error)
            with suppress(OSError):
                connection.send({"error": str(error)})
        except OSError as error:
            log.debug("a client of the peer server is gone: %s", error)
        except Exception:
            # One client must not end the service for the others.
            log.exception("a client of the peer server was dropped")
        finally:
            connection.close()
            with self._lock:
                self._clients.pop(connection, None)
