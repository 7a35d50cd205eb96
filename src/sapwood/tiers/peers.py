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

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.errors import ConfigError, SapwoodError
from sapwood.runtime import faults
from sapwood.tiers.blobs import BlobFile, BlobFolder
from sapwood.tiers.keeper import Blob
from sapwood.tiers.wire import BLOCK_BYTES, Connection, WireError

__all__ = ["PeerServer"]

log = logging.getLogger(__name__)
RECORD_LIMIT = 64 * 2**20
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
        self._blobs = BlobFolder(folder)
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
                # Closed, or out of descriptors, which passes.
                if not self._closed:
                    threading.Event().wait(0.05)
                continue
            self._welcome(Connection(sock, timeout=self._timeout))

    def _welcome(self, connection: Connection) -> None:
        with self._lock:
            if len(self._clients) < self._limit and not self._closed:
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="sapwood-peer", daemon=True
                )
                self._clients[connection] = thread
                thread.start()
                return
        with suppress(OSError):
            connection.send({"error": f"all {self._limit} connections are in use; try later"})
        connection.close()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.accept_from(self._token)
            while True:
                self._answer(connection, connection.receive(timeout=_IDLE_SECONDS))
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

    def _answer(self, connection: Connection, request: Mapping[str, Any]) -> None:
        operation = self._operations().get(str(request.get("op")))
        if operation is None:
            raise WireError(f"operation {request.get('op')!r} is not known")
        operation(connection, request)

    def _operations(self) -> dict[str, Callable[[Connection, Mapping[str, Any]], None]]:
        return {
            "ping": lambda connection, _: connection.send({"ok": True}),
            "put": self._put,
            "list": self._list,
            "read": self._read,
            "drop": self._drop,
        }

    def _list(self, connection: Connection, request: Mapping[str, Any]) -> None:
        try:
            found = self._blobs.names(str(request.get("area")), str(request.get("group") or ""))
        except SapwoodError as error:
            connection.send(_said(error))
            return
        body = json.dumps([[blob.group, blob.name] for blob in found]).encode()
        connection.send({"nbytes": len(body)})
        connection.send_bytes(body)

    def _read(self, connection: Connection, request: Mapping[str, Any]) -> None:
        suffix = "json" if request.get("part") == "record" else "bin"
        nbytes = request.get("nbytes")
        try:
            count = None if nbytes is None else _whole(nbytes)
            part = self._blobs.open_part(
                _blob(request), suffix, _whole(request.get("start")), count
            )
        except SapwoodError as error:
            connection.send(_said(error))
            return
        with part.file:
            size = part.start + part.nbytes if request.get("part") == "size" else part.nbytes
            connection.send({"nbytes": size})
            if request.get("part") != "size":
                connection.send_file(part.file, part.start, part.nbytes)

    def _drop(self, connection: Connection, request: Mapping[str, Any]) -> None:
        try:
            self._blobs.drop(str(request.get("area")), str(request.get("group")))
        except SapwoodError as error:
            connection.send(_said(error))
            return
        connection.send({"ok": True})

    def _put(self, connection: Connection, request: Mapping[str, Any]) -> None:
        nbytes = _whole(request.get("nbytes"))
        try:
            file = self._blobs.put(_blob(request), nbytes)
        except SapwoodError as error:
            connection.send(_said(error))
            return
        try:
            connection.send({"ok": True})
            connection.send(_received(connection, file, nbytes))
        finally:
            file.close()


def _received(connection: Connection, file: BlobFile, nbytes: int) -> dict[str, Any]:
    """Take a blob and its record; the answer to send.

    When the disk fails, the rest is still taken and thrown away: only so is the answer heard.
    """
    problem: SapwoodError | None = None
    buffer = memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
    for start in range(0, nbytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, nbytes - start)]
        connection.receive_into(block)
        faults.point("peers.receive", at=start)
        try:
            if problem is None:
                file.write(block)
        except SapwoodError as error:
            problem = error
    size = _whole(connection.receive().get("record"))
    if size > RECORD_LIMIT:
        raise WireError(f"a record of {size} bytes was announced, at most {RECORD_LIMIT} are taken")
    record = bytearray(size)
    connection.receive_into(record)
    if problem is None:
        try:
            file.seal(bytes(record))
        except SapwoodError as error:
            problem = error
    return {"ok": True} if problem is None else _said(problem)


def _said(error: SapwoodError) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _blob(request: Mapping[str, Any]) -> Blob:
    area, group, name = (str(request.get(part)) for part in ("area", "group", "name"))
    return Blob(area, group, name)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WireError(f"{value!r} is not a number of bytes")
    return value
