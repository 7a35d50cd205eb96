"""Connecting to a listener, and being let in."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from sapwood.channel.connection import Connection, Ended
from sapwood.channel.handshake import greet_server

__all__ = ["dial_tcp", "dial_unix"]

_TRIES = 4
"""A listener that strangers crowd cuts off who is slowest to greet, and that may be us."""
_PAUSE = 0.02
_CUT_OFF = (Ended, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


def dial_tcp(
    host: str,
    port: int,
    token: str,
    *,
    timeout: float,
    tls: ssl.SSLContext | None = None,
    within: float | None = None,
) -> Connection:
    """A connection on which both sides have proven the token.

    ``within``: seconds until there is one, by default ``timeout``, which is for each later block.

    Raises:
        Refused: the server does not take the token, or does not know it.
        OSError: nobody answers there, or not in time.
    """

    def secure(sock: socket.socket, deadline: float) -> socket.socket:
        if tls is None:
            return sock
        sock.settimeout(_left(deadline))
        return tls.wrap_socket(sock, server_hostname=host)

    def connect(deadline: float) -> socket.socket:
        return _connected(host, port, deadline)

    return _greeted(connect, secure, token, timeout, within)


def dial_unix(name: str, token: str, *, timeout: float, within: float | None = None) -> Connection:
    """The same, through a Unix socket.

    Raises:
        Refused: the server does not take the token, or does not know it.
        OSError: nobody answers there, or not in time.
    """

    def connect(deadline: float) -> socket.socket:
        return _to(socket.AF_UNIX, name, _left(deadline))

    return _greeted(connect, lambda sock, _: sock, token, timeout, within)


def _greeted(
    connect: Callable[[float], socket.socket],
    secure: Callable[[socket.socket, float], socket.socket],
    token: str,
    timeout: float,
    within: float | None,
) -> Connection:
    deadline = time.monotonic() + (timeout if within is None else within)
    tries = 0
    while True:
        tries += 1
        sock = connect(deadline)
        try:
            sock = secure(sock, deadline)
            connection = Connection(sock, timeout=timeout)
            greet_server(connection, token, seconds=_left(deadline))
            return connection
        except _CUT_OFF:
            sock.close()
            if tries == _TRIES or time.monotonic() + tries * _PAUSE > deadline:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(tries * _PAUSE)


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host that answers."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, *_, place) in enumerate(found, 1):
        try:
            # One that swallows what it is sent must leave time for the others.
            return _to(family, place, _left(deadline) / (len(found) - number + 1))
        except OSError:
            if number == len(found):
                raise
    raise OSError(f"{host} has no address")


def _to(family: int, place: Any, seconds: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
