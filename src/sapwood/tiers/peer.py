"""The client's side of ``PeerServer``: another node, as a keeper of blobs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.tiers.keeper import Blob
from sapwood.tiers.wire import Connection, Refused

__all__ = ["Peer"]

_IDLE_CONNECTIONS = 4
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
        self._token, self._timeout = token, timeout
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    # -- what a keeper does ------------------------------------------------------------------

    def ping(self) -> None:
        """Return if the node answers.

        Raises:
            TierError: it does not, or does not take our token.
        """
        self._ask_once({"op": "ping"})

    def put(self, blob: Blob, nbytes: int) -> Upload:
        """Begin to send."""
        with self._errors():
            connection = self._taken()
        try:
            with self._errors():
                connection.send({"op": "put", **_named(blob), "nbytes": nbytes})
                _answer(connection)
        except BaseException:
            connection.close()
            raise
        return Upload(self, connection, nbytes)

    def names(self, area: str, group: str = "") -> Sequence[Blob]:
        """Ask the node."""
        with self._errors(), self._connection() as connection:
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
        with self._errors(), self._connection() as connection:
            connection.send({"op": "read", **_named(blob), "part": "record", "start": 0})
            return bytes(_announced(connection, _LIST_LIMIT))

    def ask(self, blob: Blob, start: int, nbytes: int) -> Download:
        """Send the question."""
        with self._errors():
            connection = self._taken()
            try:
                connection.send({"op": "read", **_named(blob), "start": start, "nbytes": nbytes})
            except BaseException:
                connection.close()
                raise
        return Download(self, connection)

    def drop(self, area: str, group: str) -> None:
        """Tell the node."""
        self._ask_once({"op": "drop", "area": area, "group": group})

    def close(self) -> None:
        """End idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- connections -------------------------------------------------------------------------

    def _ask_once(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._errors(), self._connection() as connection:
            connection.send(request)
            return _answer(connection)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for one exchange; it is used again only if that went well."""
        connection = self._taken()
        try:
            yield connection
        except CheckpointError:
            self._given_back(connection)  # the node answered, only not what one hoped for
            raise
        except BaseException:
            connection.close()
            raise
        self._given_back(connection)

    def _taken(self) -> Connection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if not connection.stale:
                return connection
            connection.close()
        sock = socket.create_connection(self._where, timeout=self._timeout)
        connection = Connection(sock, timeout=self._timeout)
        try:
            connection.introduce(self._token)
        except BaseException:
            connection.close()
            raise
        return connection

    def _given_back(self, connection: Connection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say which node it was."""
        who = f"node {self.node} ({self.address})"
        try:
            yield
        except TierError as error:
            raise TierError(f"{who}: {error}") from error
        except Refused as error:
            raise TierError(f"{who}: {error}; all nodes must be given the same token") from error
        except TimeoutError as error:
            raise TierError(f"{who} did not answer in {self._timeout:g} s") from error
        except OSError as error:
            raise TierError(f"{who} cannot be reached: {error.strerror or error}") from error


class Upload:
    """A blob on its way to another node. Fulfils ``Sink``."""

    def __init__(self, peer: Peer, connection: Connection, nbytes: int) -> None:
        """Made by ``Peer``."""
        self._peer = peer
        self._left = nbytes
        self._connection: Connection | None = connection

    def write(self, data: Any) -> None:
        """Send the next bytes."""
        assert self._connection is not None
        self._left -= memoryview(data).nbytes
        with self._peer._errors():
            self._connection.send_bytes(data)

    def seal(self, record: bytes) -> None:
        """Send the record."""
        assert self._connection is not None
        assert self._left == 0, f"{self._left} bytes of the blob were not given"
        with self._peer._errors():
            self._connection.send({"record": len(record)})
            self._connection.send_bytes(record)

    def wait(self) -> None:
        """Wait for the node to say that it is durable there."""
        assert self._connection is not None
        with self._peer._errors():
            _answer(self._connection)
        self._peer._given_back(self._connection)
        self._connection = None

    def close(self) -> None:
        """End the connection, if the blob is not there yet: the node then forgets it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Download:
    """Bytes that were asked for. Fulfils ``Pending``."""

    def __init__(self, peer: Peer, connection: Connection) -> None:
        """Made by ``Peer``."""
        self._peer = peer
        self._connection: Connection | None = connection

    def into(self, out: Any) -> None:
        """Receive them."""
        connection, self._connection = self._connection, None
        assert connection is not None
        try:
            with self._peer._errors():
                _expect(_answer(connection), memoryview(out).nbytes)
                connection.receive_into(out)
        except CheckpointError:
            self._peer._given_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._peer._given_back(connection)

    def close(self) -> None:
        """End the connection, if its answer was not taken."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _named(blob: Blob) -> dict[str, str]:
    return {"area": blob.area, "group": blob.group, "name": blob.name}


def _answer(connection: Connection) -> dict[str, Any]:
    """An answer that is no error."""
    answer = connection.receive()
    if "error" not in answer:
        return answer
    if answer.get("kind") == "CheckpointError":
        raise CheckpointError(str(answer["error"]))
    raise TierError(str(answer["error"]))


def _announced(connection: Connection, limit: int) -> bytearray:
    """The bytes an answer announces."""
    nbytes = _answer(connection).get("nbytes")
    if not isinstance(nbytes, int) or not 0 <= nbytes <= limit:
        raise TierError(f"it announced {nbytes!r} bytes, expected at most {limit}")
    body = bytearray(nbytes)
    connection.receive_into(body)
    return body


def _expect(answer: dict[str, Any], nbytes: int) -> None:
    if answer.get("nbytes") != nbytes:
        raise TierError(f"it announced {answer.get('nbytes')!r} bytes, expected {nbytes}")
