"""Serves a provider to clients on this machine and others: listeners, tokens, sessions."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from sapwood.channel.connection import Connection
from sapwood.channel.listener import Limits, Listener, bind_tcp, bind_unix
from sapwood.errors import ConfigError
from sapwood.repository.providers.local import LocalProvider
from sapwood.repository.providers.rights import Rights
from sapwood.repository.providers.session import Client, Session

__all__ = ["ProviderServer"]

log = logging.getLogger(__name__)
LIMITS = Limits(timeout=30.0)


@dataclass(eq=False)
class _Known:
    """A client process, as long as it has a connection."""

    client: Client
    connections: int = field(default=0)


class ProviderServer:
    """Listens until it is closed. Owns its listeners; the provider stays the caller's.

    Clients of this machine are told the name of a Unix socket, through which shared memory can be
    passed; they prove their token there, too. It has no file, and is not encrypted.

    Args:
        provider: what is served.
        tokens: tokens with their rights by public names; see ``rights.load_rights``.
        sock: a listening socket, by default a free port of the loopback interface.
        tls: encrypts what comes over TCP.
        limits: what clients may take.
    """

    def __init__(
        self,
        provider: LocalProvider,
        tokens: Mapping[str, tuple[str, Rights]],
        *,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        """Begin to serve.

        Raises:
            ConfigError: it cannot listen.
        """
        self.provider = provider
        self._tokens = dict(tokens)
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], _Known] = {}
        sock = sock or bind_tcp("127.0.0.1")
        # A client whose machine has lost power says no more; the system notices in two hours.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.unix = f"\0sapwood-store-{secrets.token_hex(16)}"
        self._tcp = Listener(
            sock, self._token_of, self._serve, name="sapwood-provider", tls=tls, limits=limits
        )
        try:
            self._unix = Listener(
                bind_unix(self.unix),
                self._token_of,
                self._serve,
                name="sapwood-provider",
                limits=limits,
            )
        except ConfigError:
            self._tcp.close()
            raise

    @property
    def address(self) -> str:
        """``host:port`` that it listens on."""
        return self._tcp.address

    def close(self) -> None:
        """End the listeners and every session. Calling it again does nothing."""
        self._tcp.close()
        self._unix.close()

    # -- sessions ----------------------------------------------------------------------------

    def _token_of(self, key: str) -> str | None:
        found = self._tokens.get(key)
        return None if found is None else found[0]

    def _serve(self, connection: Connection) -> None:
        _, rights = self._tokens[connection.key]
        session = Session(self.provider, connection, rights, self.unix, self._arrived)
        try:
            session.serve()
        finally:
            if session.client is not None:
                self._left(connection.key, session.client)

    def _arrived(self, key: str, name: str) -> Client:
        """The client process that a connection is of."""
        with self._lock:
            known = self._clients.setdefault((key, name), _Known(Client(name)))
            known.connections += 1
            return known.client

    def _left(self, key: str, client: Client) -> None:
        """What a process has reserved is given up with the last of its connections."""
        with self._lock:
            known = self._clients[key, client.name]
            known.connections -= 1
            if known.connections:
                return
            del self._clients[key, client.name]
        self.provider.heads.give_up(client)
