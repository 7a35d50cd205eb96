"""Who is let in: proofs, and everything that is none."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.channel import connection as connection_module
from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import dial_tcp
from sapwood.channel.handshake import (
    PROTOCOL,
    Refused,
    _proof,
    greet_client,
    greet_server,
    key_of,
)
from sapwood.channel.listener import bind_tcp
from tests.channel.places import OTHER, TOKEN, TOKENS, Clock, Place, Trickle, framed


def test_which_token_a_client_knows(place: Place) -> None:
    for token in (TOKEN, OTHER):
        with closing(place.dial(token)) as connection:
            connection.send({})
            assert connection.receive()["key"] == key_of(token)
    assert TOKEN not in key_of(TOKEN)


def test_a_wrong_token_is_refused(place: Place) -> None:
    with pytest.raises(Refused, match="wrong token"):
        place.dial("guessed")


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    """Else a client would tell its secrets to whoever took the port."""
    with bind_tcp("127.0.0.1") as listener:
        port = listener.getsockname()[1]

        def impostor() -> None:
            sock, _ = listener.accept()
            with closing(Connection(sock, timeout=5.0)) as connection:
                connection.send({"protocol": PROTOCOL, "nonce": "00" * 16})
                connection.receive()
                connection.send({"proof": "0" * 64})

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(Refused, match="does not know the token itself"):
            dial_tcp("127.0.0.1", port, TOKEN, timeout=5.0)
        thread.join()


def test_a_proof_cannot_be_used_again() -> None:
    place = Place("tcp")
    try:
        heard = _answer_to({"nonce": "11" * 16})  # what a client answered to another greeting
        with closing(Connection(place.raw(), timeout=5.0)) as connection:
            connection.receive()
            connection.send(heard)
            assert connection.receive() == {"error": "wrong token"}
    finally:
        place.listener.close()


def _answer_to(hello: dict[str, str]) -> dict[str, str]:
    """What a client that knows the token answers to a hello."""
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as server, closing(theirs):
        client = Connection(theirs, timeout=5.0)
        thread = threading.Thread(target=lambda: _try_greeting(client))
        thread.start()
        server.send({"protocol": PROTOCOL, **hello})
        answer = server.receive()
        server.send({"error": "that is all"})
        thread.join()
    return answer


def _try_greeting(client: Connection) -> None:
    with suppress(OSError):
        greet_server(client, TOKEN)


def test_a_proof_that_is_given_back_is_none() -> None:
    """A server that knows nothing can only say again what it heard."""
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as server, closing(theirs):
        problems: list[BaseException] = []

        def greet() -> None:
            try:
                greet_server(Connection(theirs, timeout=5.0), TOKEN)
            except OSError as error:
                problems.append(error)

        thread = threading.Thread(target=greet)
        thread.start()
        server.send({"protocol": PROTOCOL, "nonce": "00" * 16})
        server.send({"proof": server.receive()["proof"]})
        thread.join()
    assert isinstance(problems[0], Refused)


ODD = [None, 1, "", "xyz", "AB", "0" * 129, "\ud800", ["00"], {}]


def greeted(said: bytes) -> tuple[bytes, list[str]]:
    """What a server tells one who says all this and hangs up, and whom it let in."""
    ours, theirs = socket.socketpair()
    admitted: list[str] = []
    with closing(theirs):
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with closing(Connection(ours, timeout=5.0)) as connection, suppress(OSError):
            greet_client(
                connection, TOKENS.get, seconds=5.0, admit=lambda: admitted.append("somebody")
            )
            admitted.append("to the end")
        told = b""
        with suppress(ConnectionResetError):
            while more := theirs.recv(65536):
                told += more
    return told, admitted


def said_by(told: bytes) -> list[dict[str, Any]]:
    messages = []
    while told:
        (length,) = struct.unpack("!I", told[:4])
        messages.append(json.loads(told[4 : 4 + length]))
        told = told[4 + length :]
    return messages


@pytest.mark.parametrize("name", ["nonce", "key", "proof"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_words_of_a_client_are_refused(name: str, odd: Any) -> None:
    right = {"nonce": "11" * 16, "key": key_of(TOKEN), "proof": "22" * 32}
    told, admitted = greeted(framed({**right, name: odd}))
    assert not admitted
    hello, *more = said_by(told)
    assert set(hello) == {"protocol", "nonce"}
    assert more in ([], [{"error": "wrong token"}])


def answered(said: bytes) -> None:
    """A client that knows the token, and a server that says all this and hangs up."""
    ours, theirs = socket.socketpair()
    with closing(theirs), closing(Connection(ours, timeout=5.0)) as connection:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        greet_server(connection, TOKEN)


@pytest.mark.parametrize("odd", ODD)
def test_odd_words_of_a_server_are_refused(odd: Any) -> None:
    hello = {"protocol": PROTOCOL, "nonce": "00" * 16}
    with pytest.raises(ChannelError, match="it sent no nonce"):
        answered(framed({**hello, "nonce": odd}))
    with pytest.raises(Refused, match="does not know the token itself"):
        answered(framed(hello) + framed({"proof": odd}))
    with pytest.raises(ChannelError, match="it speaks"):
        answered(framed({**hello, "protocol": odd}))


words = st.sampled_from([*TOKENS, "00" * 16, "11" * 32]) | st.sampled_from(ODD) | st.integers()
messages = st.dictionaries(
    st.sampled_from(["protocol", "nonce", "key", "proof", "error", "x"]),
    words | st.just(PROTOCOL),
    max_size=5,
)
conversations = st.lists(messages.map(framed) | st.binary(max_size=50), max_size=4).map(b"".join)


@settings(max_examples=200)
@given(conversations)
def test_no_stranger_is_let_in_or_told_a_proof(said: bytes) -> None:
    told, admitted = greeted(said)
    assert not admitted
    hello, *more = said_by(told)
    assert set(hello) == {"protocol", "nonce"}
    assert more in ([], [{"error": "wrong token"}])


@settings(max_examples=200)
@given(conversations)
def test_no_stranger_is_taken_for_the_server(said: bytes) -> None:
    with pytest.raises(OSError):
        answered(said)


def test_a_proof_is_of_one_side_both_numbers_and_one_token() -> None:
    one = _proof(TOKEN, "client", "aa", "bb")
    assert (
        len(
            {
                one,
                _proof(TOKEN, "server", "aa", "bb"),
                _proof(TOKEN, "client", "bb", "aa"),
                _proof(TOKEN, "client", "aab", "b"),
                _proof(OTHER, "client", "aa", "bb"),
            }
        )
        == 5
    )


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_greeting_takes_no_longer_than_it_may(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, of the longest message that is taken, and of its length."""
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    sock: Any = Trickle(clock, struct.pack("!I", 1000) + b" " * 1000)
    connection, start = Connection(sock, timeout=500.0), clock.now
    greet = {
        "client": lambda: greet_server(connection, TOKEN, seconds=7.5),
        "server": lambda: greet_client(connection, TOKENS.get, seconds=7.5),
    }
    with pytest.raises(TimeoutError):
        greet[side]()
    assert clock.now - start == 7.5
