"""Getting in: deadlines, coming again, and hosts with several addresses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from sapwood.channel import dial as dial_module
from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import _TRIES, dial_tcp
from sapwood.channel.handshake import Refused, greet_client
from sapwood.channel.listener import bind_tcp
from sapwood.channel.tls import client_context, server_context
from tests.channel.places import HERE, TOKEN, TOKENS

Answer = Callable[[socket.socket, int], None]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[int, list[int]]]:
    """The port of one that does this with each connection, and how many there were."""
    seen: list[int] = []
    with bind_tcp("127.0.0.1") as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    seen.append(len(seen) + 1)
                    with closing(sock), suppress(OSError):
                        answer(sock, len(seen))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], seen
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def greets(sock: socket.socket) -> None:
    connection = Connection(sock, timeout=5.0)
    greet_client(connection, TOKENS.get, seconds=5.0)
    connection.send({"hello": connection.receive()["name"]})


def said_hello(connection: Connection) -> None:
    with closing(connection):
        connection.send({"name": "me"})
        assert connection.receive() == {"hello": "me"}


def test_who_is_cut_off_comes_again() -> None:
    def answer(sock: socket.socket, number: int) -> None:
        if number == 2:
            Connection(sock, timeout=5.0).send({"protocol": "sapwood-channel/1", "nonce": "00"})
        elif number > 2:
            greets(sock)

    with server(answer) as (port, seen):
        said_hello(dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0))
        assert seen == [1, 2, 3]


def test_who_is_cut_off_before_encryption_comes_again() -> None:
    def answer(sock: socket.socket, number: int) -> None:
        if number > 2:
            context = server_context(HERE / "server.cert.pem", HERE / "server.key.pem")
            with context.wrap_socket(sock, server_side=True) as secured:
                greets(secured)

    tls = client_context(HERE / "server.cert.pem")
    with server(answer) as (port, seen):
        said_hello(dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0, tls=tls))
        assert seen == [1, 2, 3]


def test_nobody_comes_again_for_ever() -> None:
    with server(lambda *_: None) as (port, seen):
        with pytest.raises((ChannelError, ConnectionError)):
            dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0)
        assert len(seen) == _TRIES


def test_who_is_refused_does_not_come_again() -> None:
    with server(lambda sock, _: greets(sock)) as (port, seen):
        with pytest.raises(Refused):
            dial_tcp("127.0.0.1", port, "guessed", timeout=5.0)
        assert seen == [1]


def test_one_that_speaks_something_else_is_not_asked_again() -> None:
    with server(lambda sock, _: sock.sendall(b"\0\0\0\2{}")) as (port, seen):
        with pytest.raises(ChannelError, match="it speaks None"):
            dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0)
        assert seen == [1]


def test_no_time_is_left_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(lambda *_: None) as (port, seen):
        with pytest.raises(OSError):
            dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0, within=dial_module._PAUSE / 2)
        assert len(seen) <= 1


def test_the_limit_of_dialling_is_not_that_of_what_follows() -> None:
    silent = threading.Event()
    with server(lambda *_: silent.wait(30.0) and None) as (port, _):
        with pytest.raises(TimeoutError):
            dial_tcp("127.0.0.1", port, TOKEN, timeout=1000.0, within=0.05)
        silent.set()
    with server(lambda sock, _: greets(sock)) as (port, _):
        connection = dial_tcp("127.0.0.1", port, TOKEN, timeout=77.0, within=5.0)
        assert connection.timeout == 77.0
        said_hello(connection)


def test_each_address_of_a_host_is_tried_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, float]] = []
    real = dial_module._to

    def to(family: int, place: Any, seconds: float) -> socket.socket:
        tried.append((place[0], seconds))
        if place[0] != "127.0.0.1":
            raise TimeoutError("it swallows what it is sent")
        return real(family, place, seconds)

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        places = ["192.0.2.1", "192.0.2.2", "127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in places]

    monkeypatch.setattr(dial_module, "_to", to)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with server(lambda sock, _: greets(sock)) as (port, _):
        said_hello(dial_tcp("a.host", port, TOKEN, timeout=60.0))
    assert [place for place, _ in tried] == ["192.0.2.1", "192.0.2.2", "127.0.0.1"]
    assert tried[0][1] <= 20.0
    assert tried[1][1] <= 30.0


def test_the_last_address_says_why() -> None:
    with bind_tcp("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0)
