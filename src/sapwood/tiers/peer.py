"""The client's side of ``PeerServer``: another node, as a keeper of blobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sapwood.channel.connection import Connection
from sapwood.channel.dial import dial_tcp
from sapwood.channel.handshake import Refused
from sapwood.channel.pool import Pool
from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.tiers.keeper import Blob
from sapwood.tiers.room import NoRoomError
from sapwood.tiers.spec import NodeMap
from sapwood.tiers.transfers import Download, Upload, answer

__all__ = ["Peer", "peers_of"]

_LIST_LIMIT = 256 * 2**20


class Peer:
    """Another node. Fulfils ``Keeper``; connections are made when needed and used again."""

    def __init__(self, node: str, address: str, token: str, *, timeout: float = 10.0) -> None:
        """``address`` is what the node's ``PeerServer`` says; nothing is connected yet."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"the address of node {node} is {address!r}, expected host:port")
        self._where = (host.strip("[]"), int(port))
        self.node, self.address = node, address
        self._timeout = timeout
        self._pool = Pool(lambda _: dial_tcp(*self._where, token, timeout=timeout))

    # -- what a keeper does ------------------------------------------------------------------

    def ping(self) -> None:
        """Return if the node answers.

        Raises:
            TierError: it does not, or does not take our token.
        """
        self._ask_once({"op": "ping"})

    def put(self, blob: Blob, nbytes: int) -> Upload:
        """Begin to send."""
        with self.errors():
            connection = self._pool.take()
        try:
            with self.errors():
                connection.send({"op": "put", **_named(blob), "nbytes": nbytes})
                answer(connection)
        except BaseException:
            self.discard(connection)
            raise
        return Upload(self, connection, nbytes)

    def names(self, area: str, group: str = "") -> Sequence[Blob]:
        """Ask the node."""
        with self.errors(), self._connection() as connection:
            connection.send({"op": "list", "area": area, "group": group})
            body = _announced(connection, _LIST_LIMIT)
        try:
            return sorted(Blob(area, str(g), str(name)) for g, name in json.loads(body))
        except (ValueError, TypeError) as error:
            raise TierError(f"node {self.node} sent a list that is none") from error

    def size(self, blob: Blob) -> int:
        """Ask the node."""
        request = {"op": "read", **_named(blob), "part": "size", "start": 0}
        return int(self._ask_once(request)["nbytes"])

    def record(self, blob: Blob) -> bytes:
        """Fetch the record."""
        with self.errors(), self._connection() as connection:
            connection.send({"op": "read", **_named(blob), "part": "record", "start": 0})
            return bytes(_announced(connection, _LIST_LIMIT))

    def ask(self, blob: Blob, start: int, nbytes: int) -> Download:
        """Send the question."""
        with self.errors():
            connection = self._pool.take()
            try:
                connection.send({"op": "read", **_named(blob), "start": start, "nbytes": nbytes})
            except BaseException:
                self.discard(connection)
                raise
        return Download(self, connection)

    def drop(self, area: str, group: str) -> None:
        """Tell the node."""
        self._ask_once({"op": "drop", "area": area, "group": group})

    def close(self) -> None:
        """End all connections."""
        self._pool.close()

    # -- connections -------------------------------------------------------------------------

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that is idle and in order for the next exchange."""
        self._pool.give_back(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection whose exchange did not end."""
        self._pool.discard(connection)

    def _ask_once(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.errors(), self._connection() as connection:
            connection.send(request)
            return answer(connection)

    def _connection(self) -> AbstractContextManager[Connection]:
        """For one exchange; a node that answered, only not what one hoped for, is in order."""
        return self._pool.connection(CheckpointError)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what goes wrong with a connection as ``TierError``, saying which node it was."""
        who = f"node {self.node} ({self.address})"
        try:
            yield
        except NoRoomError as error:
            raise NoRoomError(f"{who}: {error}") from error
        except TierError as error:
            raise TierError(f"{who}: {error}") from error
        except Refused as error:
            raise TierError(f"{who}: {error}; all nodes must be given the same token") from error
        except TimeoutError as error:
            raise TierError(f"{who} did not answer in {self._timeout:g} s") from error
        except OSError as error:
            raise TierError(f"{who} cannot be reached: {error.strerror or error}") from error


def peers_of(nodes: NodeMap, names: Sequence[str], timeout: float) -> dict[str, Peer]:
    """Other nodes as keepers.

    Raises:
        ConfigError: the address of one is not known.
    """
    unknown = [name for name in names if name not in nodes.addresses]
    if unknown:
        raise ConfigError(
            f"node {nodes.node} has not been told where the peer servers of "
            f"{', '.join(unknown)} listen; nodes known are {sorted(nodes.addresses) or 'none'}"
        )
    return {n: Peer(n, nodes.addresses[n], nodes.token, timeout=timeout) for n in names}


def _named(blob: Blob) -> dict[str, str]:
    return {"area": blob.area, "group": blob.group, "name": blob.name}


def _announced(connection: Connection, limit: int) -> bytearray:
    """The bytes an answer announces."""
    nbytes = answer(connection).get("nbytes")
    if not isinstance(nbytes, int) or not 0 <= nbytes <= limit:
        raise TierError(f"it announced {nbytes!r} bytes, expected at most {limit}")
    body = bytearray(nbytes)
    connection.receive_into(body)
    return body
