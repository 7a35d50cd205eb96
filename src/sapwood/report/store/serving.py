"""The server of the page: on loopback, in a thread of its own, until it is closed."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from sapwood.errors import ConfigError, StoreError
from sapwood.store import Repository

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

__all__ = ["Serving"]

_HOST = "127.0.0.1"
_START, _END = 20.0, 20.0
_GRACE = 2
"""Whole seconds that a request may still take when the server is closed."""
_CONNECTIONS = 64
_MISSING = "the page of a repository needs two more packages: pip install 'sapwood[web]'"


class Serving:
    """Serves a repository's page from ``__init__`` until ``close``; the repository stays open."""

    def __init__(
        self, repo: Repository, *, place: str, port: int = 0, token: str | None = None
    ) -> None:
        """Listen; port 0 takes a free one.

        Args:
            repo: the repository.
            place: its name for people.
            port: on loopback.
            token: who has it may change tags and remove versions; None is read-only for all.

        Raises:
            ConfigError: the packages it needs are missing, or the port cannot be had.
        """
        try:
            from sapwood.report.store.app import Page

            self._page = Page(repo, place=place, token=token)
            self._server = _server(self._page.app())
        except ModuleNotFoundError as error:
            if error.name not in ("uvicorn", "starlette"):
                raise
            raise ConfigError(_MISSING) from None
        self._socket = _listening(port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="sapwood-page-server")
        self._thread.start()
        try:
            self._await_start()
        except BaseException:  # also Ctrl-C: nobody else would end the thread
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{_HOST}:{self.port}/"

    def wait(self, seconds: float) -> bool:
        """Whether the server has ended by itself, after at most so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the server and everything it has begun. Calling it again does nothing."""
        self._server.should_exit = True
        self._page.close()  # first: requests that wait for work hear that it is cancelled
        self._thread.join(_END)
        self._socket.close()

    def __enter__(self) -> Serving:
        """Closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _await_start(self) -> None:
        deadline = time.monotonic() + _START
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise StoreError(f"the server did not start within {_START:g} s; see its log")
            time.sleep(0.01)


def _server(app: ASGIApp) -> uvicorn.Server:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=_GRACE,
        limit_concurrency=_CONNECTIONS,
    )
    return uvicorn.Server(config)


def _listening(port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}, expected 0 (any) to 65535")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((_HOST, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on port {port}: {error.strerror}; name another one, or leave it away"
        ) from error
    return sock
