"""Limits before the proof, and ends."""

from __future__ import annotations

import errno
import json
import logging
import socket
import ssl
import struct
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from sapwood.channel import listener as listener_module
from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import dial_tcp
from sapwood.channel.handshake import HELLO_LIMIT, Refused, greet_client
from sapwood.channel.listener import Limits, Listener, bind_tcp
from sapwood.channel.tls import client_context, server_context
from sapwood.errors import ConfigError
from tests.channel.places import (
    LIMITS,
    TOKEN,
    TOKENS,
    Clock,
    Place,
    echo,
    exchange,
    framed,
    rest,
)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("!I", HELLO_LIMIT + 1) + b"x",
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 4) + b"nope",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 900) + b"[" * 900,
    ],
)
def test_nonsense_before_the_proof_ends_the_connection(place: Place, said: bytes) -> None:
    with closing(place.raw()) as sock:
        sock.sendall(said)
        with suppress(OSError):  # it may have been quicker
            sock.shutdown(socket.SHUT_WR)
        told = rest(sock)
    if place.way != "tls":
        (length,) = struct.unpack("!I", told[:4])
        assert set(json.loads(told[4 : 4 + length])) == {"protocol", "nonce"}
        assert told[4 + length :] in (b"", framed({"error": "wrong token"}))
    with closing(place.dial()) as connection:
        exchange(connection)


@pytest.mark.parametrize("silent", [LIMITS.unproven, 5 * LIMITS.unproven])
def test_silent_connections_keep_nobody_out(place: Place, silent: int) -> None:
    with ExitStack() as stack:
        for _ in range(silent):
            stack.enter_context(closing(place.raw()))
        for _ in range(3):
            with closing(place.dial()) as connection:
                exchange(connection)


def test_the_greeting_of_one_that_is_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("tcp")
    place.listener._limits = Limits(greeting=0.2)
    try:
        with closing(place.raw()) as sock:
            assert rest(sock)  # the hello, and then the end
    finally:
        place.listener.close()


def test_more_than_fit_are_told_to_come_later(place: Place) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.proven):
            exchange(stack.enter_context(closing(place.dial())))
        with closing(place.dial()) as one_more:
            assert "in use" in one_more.receive()["error"]
    # They leave, and there is room again.
    for _ in range(200):
        with closing(place.dial()) as connection, suppress(KeyError, OSError):
            exchange(connection)
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no room was made")


def test_one_that_breaks_the_service_ends_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    def serve(connection: Connection) -> None:
        if connection.receive().get("break"):
            raise ZeroDivisionError("a mistake of ours")
        connection.send({"ok": True})

    place = Place("tcp", serve)
    try:
        with closing(place.dial()) as bad:
            bad.send({"break": True})
            with pytest.raises(ChannelError):
                bad.receive()
        with closing(place.dial()) as good:
            good.send({})
            assert good.receive() == {"ok": True}
    finally:
        place.listener.close()
    assert "a mistake of ours" in caplog.text


def test_closing_ends_everything(place: Place) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(place.dial())) for _ in range(3)]
        stranger = stack.enter_context(closing(place.raw()))
        place.listener.close()
        place.listener.close()
        for connection in connections:
            with pytest.raises(OSError):
                connection.receive()
        rest(stranger)
        with pytest.raises(OSError):
            place.raw()
    assert not [t for t in threading.enumerate() if t.name == "sapwood-test-listener"]


def test_a_certificate_of_somebody_else_is_refused(tmp_path: Path) -> None:
    place = Place("tls")
    try:
        with pytest.raises(ssl.SSLError):
            dial_tcp(
                "127.0.0.1",
                place.listener.port,
                TOKEN,
                timeout=5.0,
                tls=ssl.create_default_context(),
            )
        with pytest.raises(OSError):
            dial_tcp("127.0.0.1", place.listener.port, TOKEN, timeout=5.0, within=0.2)
    finally:
        place.listener.close()
    (tmp_path / "no.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="in PEM"):
        client_context(tmp_path / "no.pem")
    with pytest.raises(ConfigError, match="in PEM"):
        server_context(tmp_path / "no.pem", tmp_path / "missing.pem")


def test_an_address_that_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind_tcp("192.0.2.1")
    with bind_tcp("127.0.0.1") as taken, pytest.raises(ConfigError, match="cannot listen"):
        bind_tcp("127.0.0.1", taken.getsockname()[1])


# -- a place that was earned -----------------------------------------------------------------


def crowd(place: Place, stack: ExitStack) -> None:
    """Take all places of the unproven, which ends those that have them."""
    strangers = [stack.enter_context(closing(place.raw())) for _ in range(2 * LIMITS.unproven)]
    for stranger in strangers:  # each was let in: it is greeted, or has been cut off since
        with suppress(ConnectionError):
            stranger.recv(1, socket.MSG_PEEK)


def test_who_was_told_that_it_is_in_stays_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        place = Place("tcp")
        stack.callback(place.listener.close)
        greeted = threading.Event()

        def greet(*args: Any, **kwargs: Any) -> None:
            greet_client(*args, **kwargs)
            if not greeted.is_set():  # the honest one
                greeted.set()
                crowd(place, stack)

        monkeypatch.setattr(listener_module, "greet_client", greet)
        with closing(place.dial()) as connection:
            exchange(connection)
        assert greeted.is_set()


def test_who_loses_its_place_while_it_proves_comes_again() -> None:
    seen: list[str] = []
    with ExitStack() as stack:

        def token_of(key: str) -> str | None:
            seen.append(key)
            if len(seen) == 1:
                crowd(place, stack)
            return TOKENS.get(key)

        place = Place("tcp", echo, token_of)
        stack.callback(place.listener.close)
        with closing(place.dial()) as connection:
            exchange(connection)
        assert len(seen) > 1


# -- what is said, and how often -------------------------------------------------------------


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    place = Place("unix")
    try:
        for _ in range(20):
            with pytest.raises(Refused):
                place.dial("guessed")
        while place.listener._unsaid < 19:  # it is counted after the client was told
            time.sleep(0.001)
        place.listener._silent_until = 0.0  # ten seconds later
        with pytest.raises(Refused):
            place.dial("guessed")
        while place.listener._unsaid:
            time.sleep(0.001)
    finally:
        place.listener.close()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2
    assert said[0].endswith("a client was refused: it does not know the token")
    assert said[1].endswith("(and 19 before)")


class Starved(socket.socket):
    """A listener that has no descriptor for the first clients."""

    left = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_no_more_descriptors_are_said_and_pass(caplog: pytest.LogCaptureFixture) -> None:
    sock = Starved(fileno=bind_tcp("127.0.0.1").detach())
    listener = Listener(sock, TOKENS.get, echo, name="sapwood-test-listener", limits=LIMITS)
    try:
        with closing(dial_tcp("127.0.0.1", listener.port, TOKEN, timeout=20.0)) as connection:
            exchange(connection)
    finally:
        listener.close()
    assert "a client could not be served: [Errno 24] Too many open files" in caplog.text


def test_no_more_threads_are_said_and_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place("tls")
    real, failed = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if thread.name == place.listener.name and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        with closing(place.dial()) as connection:
            exchange(connection)
        assert failed.is_set()
        assert not place.listener._unproven
    finally:
        place.listener.close()
    assert "a client could not be served: can't start new thread" in caplog.text


def test_a_listener_without_a_thread_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sock = bind_tcp("127.0.0.1")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConfigError, match="ulimit -u"):
        Listener(sock, TOKENS.get, echo, name="sapwood-test-listener")
    assert sock.fileno() == -1


# -- half-closed, and closing ----------------------------------------------------------------


def test_one_that_hangs_up_half_way_is_served_to_the_end(place: Place) -> None:
    with closing(place.dial()) as connection:
        connection.send({"nbytes": 0})
        if place.way == "tls":  # it knows no half
            return
        connection._sock.shutdown(socket.SHUT_WR)
        assert connection.receive()["nbytes"] == 0
        with pytest.raises(ChannelError):
            connection.receive()


class Stuck:
    """A thread that does not end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def join(self, timeout: float) -> None:
        self.clock.now += timeout


def test_closing_waits_once_for_all_that_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock = Place("tcp"), Clock()
    monkeypatch.setattr(listener_module, "time", clock)
    ours = [Connection(socket.socket(socket.AF_UNIX), timeout=5.0) for _ in range(20)]
    stuck: Any = {connection: Stuck(clock) for connection in ours}
    place.listener._proven.update(stuck)
    start = clock.now
    place.listener.close()
    assert clock.now - start <= listener_module._CLOSE_SECONDS
    for connection in ours:
        connection.close()
