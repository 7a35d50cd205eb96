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

from contextlib import suppress
from pathlib import Path

from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.handshake import key_of
from sapwood.channel.listener import Limits, Listener, bind_tcp
from sapwood.errors import ConfigError
from sapwood.tiers.answers import Answers
from sapwood.tiers.blobs import BlobFolder

__all__ = ["PeerServer"]

_IDLE_SECONDS = 600.0
"""A client that wants nothing for so long is sent away; it comes back when it wants something."""


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
        self._token, self._where = token, (host, port)
        self._limits = Limits(proven=connections, greeting=min(timeout, 5.0), timeout=timeout)
        self._listener: Listener | None = None

    @property
    def address(self) -> str:
        """``host:port``, as the others must be told."""
        assert self._listener is not None, "start() comes first"
        return self._listener.address

    def start(self) -> PeerServer:
        """Listen, and serve on threads of its own.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._listener = Listener(
            bind_tcp(*self._where),
            {key_of(self._token): self._token}.get,
            self._serve,
            name="sapwood-peers",
            limits=self._limits,
        )
        return self

    def close(self) -> None:
        """End all connections and threads; what is kept stays. Calling it again does nothing."""
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> PeerServer:
        """Start, and close at the end of a ``with`` block."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                self._answers.answer(connection, connection.receive(timeout=_IDLE_SECONDS))
        except ChannelError as error:
            with suppress(OSError):
                connection.send({"error": str(error)})
            raise
