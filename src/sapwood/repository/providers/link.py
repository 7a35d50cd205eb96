"""A client's connections to one provider: TCP, or a Unix socket on the same machine."""

from __future__ import annotations

import os
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import dial_tcp, dial_unix
from sapwood.channel.handshake import Refused
from sapwood.channel.pool import Pool
from sapwood.errors import ConfigError, Denied, SapwoodError, StoreError, Unreachable
from sapwood.repository.providers.wire import (
    ANSWER_LIMIT,
    PROTOCOL,
    error_of,
    receive_body,
    send,
)
from sapwood.storage import Durability

__all__ = ["Exchange", "Link", "split_address"]

_FDS = 64
"""Descriptors that come with one answer; a provider opens no more packs for one."""
_IDLE = 8
_LOCAL_SECONDS = 5.0


@dataclass(frozen=True)
class About:
    """What a provider says of itself."""

    name: str
    unix: str
    keeps: bool
    """Whether sealed memory that it is given stays where it is."""
    durability: Durability
    """The most it can promise by itself."""


class Exchange:
    """One request and its answers, on a connection that nobody else uses meanwhile."""

    def __init__(self, connection: Connection) -> None:
        """The connection is in order."""
        self.connection = connection

    @property
    def local(self) -> bool:
        """Whether memory can be passed."""
        return self.connection.passes_fds

    def ask(
        self,
        message: Mapping[str, Any],
        body: bytes = b"",
        *,
        said: Callable[[str], None] = lambda _: None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request; the answer and its body."""
        send(self.connection, message, body)
        return self.answer(said=said)

    def answer(
        self, *, said: Callable[[str], None] = lambda _: None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The next answer; signs of life before it are passed over."""
        while True:
            message = self.connection.receive(limit=ANSWER_LIMIT, timeout=self.connection.timeout)
            if "error" in message:
                raise _Answered(error_of(message))
            if "said" in message:
                said(str(message["said"]))
            elif "alive" not in message:
                return message, receive_body(self.connection, message, ANSWER_LIMIT)


class _Answered(Exception):
    """The provider's own error, after which the connection is in order."""

    def __init__(self, error: SapwoodError) -> None:
        super().__init__(str(error))
        self.error = error


class Link:
    """Dials a provider when needed. Thread-safe; a forked child dials anew. Its user closes it.

    Args:
        address: ``host:port``.
        token: proven on each connection.
        timeout: seconds without any sign of life after which the provider is unreachable.
        tls: checks the provider's certificate and encrypts, if given.
        local: whether to use the Unix socket; None uses it if it is there.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        name: str | None,
        timeout: float,
        tls: ssl.SSLContext | None,
        local: bool | None,
    ) -> None:
        """Nothing is connected yet."""
        self.address, self.name = address, name
        self._host, self._port = split_address(address)
        self._token, self._timeout, self._tls, self._local = token, timeout, tls, local
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._client = secrets.token_hex(16)
        self._about: About | None = None
        self._unix: str | None = None
        self._lock = threading.Lock()
        self._pool = Pool(self._dial, idle=_IDLE)

    @property
    def label(self) -> str:
        """The provider, for messages."""
        name = self.name or (self._about.name if self._about is not None else None)
        return f"provider {name} at {self.address}" if name else f"the provider at {self.address}"

    def about(self) -> About:
        """What the provider said of itself when it was first reached.

        Raises:
            Unreachable: it cannot be reached.
        """
        if self._about is None or self._pid != os.getpid():
            with self.exchange():
                pass
        assert self._about is not None
        return self._about

    @contextmanager
    def exchange(self, *, timeout: float | None = None) -> Iterator[Exchange]:
        """A connection for one request.

        Raises:
            Unreachable: nobody answers, or not in time, or the connection broke.
            Denied: it does not take the token.
            SapwoodError: what the provider answered.
        """
        if self._pid != os.getpid():
            self._begin()
        if self._closed:
            raise StoreError(f"the connection to {self.label} was closed; open it again")
        try:
            with self._pool.connection(_Answered) as connection:
                if timeout is not None:
                    connection.timeout = timeout
                try:
                    yield Exchange(connection)
                finally:
                    connection.timeout = self._timeout
        except _Answered as answered:
            raise answered.error from None
        except SapwoodError:
            raise
        except Refused as error:
            raise Denied(f"{self.label} does not take this token: {error}") from error
        except TimeoutError as error:
            raise Unreachable(
                f"{self.label} did not answer within {self._timeout:g} s ({error}); is it stopped "
                "or overloaded? Try again, or raise timeout"
            ) from error
        except ssl.SSLError as error:
            raise Unreachable(f"{self.label}: TLS failed: {error}; see tls_ca") from error
        except OSError as error:
            reason = error.strerror or error
            raise Unreachable(
                f"{self.label} cannot be reached: {reason}; is it running?"
            ) from error

    def close(self) -> None:
        """End all connections. Calling it again does nothing."""
        self._closed = True
        if self._pid == os.getpid():
            self._pool.close()

    # -- dialling ----------------------------------------------------------------------------

    def _dial(self, seconds: float | None) -> Connection:
        unix = self._unix
        if unix is not None:
            try:
                return self._greeted(dial_unix(unix, self._token, timeout=self._timeout))
            except (ConnectionRefusedError, FileNotFoundError):
                self._unix = None  # it was started anew, under another name
        within = self._timeout if seconds is None else seconds
        connection = dial_tcp(
            self._host,
            self._port,
            self._token,
            timeout=self._timeout,
            tls=self._tls,
            within=within,
        )
        connection = self._greeted(connection)
        if self._local is False:
            return connection
        return self._nearer(connection)

    def _greeted(self, connection: Connection) -> Connection:
        """Say who we are, and hear who it is."""
        try:
            connection.allow_fds(_FDS)
            connection.send({"op": "hello", "client": self._client})
            answer = connection.receive()
            if "error" in answer:
                raise error_of(answer)
            if answer.get("protocol") != PROTOCOL:
                raise ChannelError(f"it speaks {answer.get('protocol')!r}, not {PROTOCOL!r}")
            name = str(answer.get("name"))
            if self.name is not None and name != self.name:
                raise ConfigError(
                    f"{self.address} is the provider {name!r}, not {self.name!r}; the list of "
                    "members has a wrong address"
                )
            try:
                durability = Durability(int(answer.get("durability", "")))
            except (TypeError, ValueError):
                raise ChannelError("it promises nothing that is known here") from None
            keeps = answer.get("keeps") is True
            self._about = About(name, str(answer.get("unix")), keeps, durability)
        except BaseException:
            connection.close()
            raise
        return connection

    def _nearer(self, connection: Connection) -> Connection:
        """The same provider through its Unix socket, if it is on this machine."""
        assert self._about is not None
        try:
            near = dial_unix(
                self._about.unix, self._token, timeout=self._timeout, within=_LOCAL_SECONDS
            )
            near = self._greeted(near)
        except (OSError, SapwoodError) as error:
            if self._local:
                connection.close()
                raise ConfigError(
                    f"{self.label} is not on this machine ({error}); leave out local=True"
                ) from error
            return connection
        connection.close()
        self._unix = self._about.unix
        return near


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: it is not ``host:port``.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{address!r} is no address of a provider; expected host:port")
    return host, int(port)
