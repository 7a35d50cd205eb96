"""Serving a repository: one socket, one server, and who ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import uvicorn

from sapwood.errors import ConfigError, StoreError, UsageError
from sapwood.integrations.hub.app import hub_app
from sapwood.runtime.tokens import check_token
from sapwood.store import Repository

__all__ = ["HubServer"]

log = logging.getLogger(__name__)
_SECONDS = 10.0
"""For a start, and for a thread to end."""
_GRACE = 5
"""Seconds for requests that are under way at the end."""
_REQUESTS = 256
"""At once; more are told to come again."""


class _Server(uvicorn.Server):
    """Ends connections that are still open when the time for requests under way is over."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        end = time.monotonic() + _GRACE
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            # Closing it would wait until the client has read what was sent, which may be never.
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        await asyncio.sleep(0.01)  # in which the loop closes their sockets
        await super().shutdown(sockets)


class HubServer:
    """Gives out a repository's models over HTTP until it is closed.

    Owns its socket and, after ``start``, a thread; ``close`` ends both. The repository stays the
    caller's.
    """

    def __init__(
        self,
        repo: Repository,
        *,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        hosts: Iterable[str] = (),
    ) -> None:
        """Bind a socket.

        Args:
            repo: what is given out.
            listen: ``host:port``; port 0 takes a free one.
            token: what clients must have in ``HF_TOKEN``; None lets everybody read.
            hosts: further names it may be asked under, such as that of a proxy. If other machines
                reach it and none is given, any will do.

        Raises:
            ConfigError: ``listen`` or the token is none.
            StoreError: the address cannot be had.
        """
        if token is not None:
            check_token(token, "token")
        host, port = _address(listen)
        self._socket = _bound(host, port)
        address = self._socket.getsockname()
        self.loopback = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{shown}:{address[1]}"
        names = {"localhost", "127.0.0.1", "::1", host.lower(), address[0]}
        further = {name.lower() for name in hosts}
        # Under which names other machines reach this one is known only to who says so.
        allowed = names | further if self.loopback or further else None
        app = hub_app(repo, token=token, hosts=allowed)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=_REQUESTS,
            timeout_graceful_shutdown=_GRACE,
            ws="none",
        )
        self._server = _Server(config)
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Serve on this thread until it is interrupted, or ``close`` is called on another one."""
        self._server.run(sockets=[self._socket])

    def start(self) -> HubServer:
        """Serve on a thread of its own; returns when connections are accepted.

        Raises:
            UsageError: it was started, or closed.
            StoreError: it did not come up.
        """
        if self._thread is not None or self._server.should_exit:
            raise UsageError("a HubServer is started once; make another one")
        self._thread = threading.Thread(target=self.serve, name="sapwood-hub", daemon=True)
        self._thread.start()
        waiting = threading.Event()
        for _ in range(int(_SECONDS * 100)):
            if self._server.started:
                return self
            if not self._thread.is_alive():
                break
            waiting.wait(0.01)
        self.close()
        raise StoreError(f"the server at {self.url} did not come up; its log says why")

    def close(self) -> None:
        """End it, giving requests under way some time. Calling it again does nothing."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(_GRACE + _SECONDS)
            if self._thread.is_alive():
                log.error("the server at %s has not ended in time", self.url)
            self._thread = None
        self._socket.close()

    def __enter__(self) -> HubServer:
        """Start; close at the end of a ``with`` block."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{listen!r} is no address, expected host:port such as 127.0.0.1:8080")
    return host, int(port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise StoreError(f"cannot listen at {host}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError as error:
        made.close()
        raise StoreError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another port, or 0 "
            "for any"
        ) from error
    return made
