"""Framing, bytes and descriptors."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.channel import connection as connection_module
from sapwood.channel.connection import BLOCK_BYTES, MESSAGE_LIMIT, Connection
from tests.channel.places import Clock, Place, Trickle, exchange


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7])
def test_messages_and_bytes(place: Place, nbytes: int) -> None:
    data = os.urandom(nbytes)
    with closing(place.dial()) as connection:
        for _ in range(2):
            assert exchange(connection, data) == data


def test_gathered_bytes_arrive_in_order_and_once(place: Place) -> None:
    parts = [os.urandom(n % 5000) for n in range(0, 1_400_000, 977)]
    whole = b"".join(parts)
    with closing(place.dial()) as connection:
        connection.send({"nbytes": len(whole)})
        connection.send_gathered(parts)
        assert connection.receive()["nbytes"] == len(whole)
        back = bytearray(len(whole))
        connection.receive_into(back)
    assert bytes(back) == whole


def test_a_file_and_its_end(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    with closing(place.dial()) as connection, path.open("rb") as file:
        connection.send({"nbytes": 90_000})
        connection.send_file(file, 5000, 90_000)
        connection.receive()
        back = bytearray(90_000)
        connection.receive_into(back)
        assert bytes(back) == path.read_bytes()[5000:95_000]


def test_descriptors_over_a_unix_socket(tmp_path: Path) -> None:
    place = Place("unix")
    try:
        files = [os.memfd_create("a"), os.memfd_create("b")]
        os.truncate(files[1], 12345)
        with closing(place.dial()) as connection:
            connection.send({"with": "two"}, fds=files)
            assert connection.receive()["sizes"] == [0, 12345]
            connection.send({"with": "none"})
            assert connection.receive()["sizes"] == []
        for fd in files:
            os.close(fd)
    finally:
        place.listener.close()


def test_descriptors_nobody_asked_for_are_dropped() -> None:
    """Else a client could fill the table of open files."""
    seen: list[int] = []

    def counts(connection: Connection) -> None:
        while True:
            connection.receive(timeout=30.0)
            seen.append(len(list(Path("/proc/self/fd").iterdir())))
            connection.send({})

    place = Place("unix", counts)
    try:
        with closing(place.dial()) as connection:
            for _ in range(5):
                connection.send({}, fds=[0, 1, 2])
                connection.receive()
        assert len(set(seen)) == 1
    finally:
        place.listener.close()


def test_a_message_that_is_too_long_is_not_taken(place: Place) -> None:
    with closing(place.dial()) as connection:
        connection.send_bytes(struct.pack("!I", MESSAGE_LIMIT + 1))
        with pytest.raises(OSError):
            connection.receive()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as connection, closing(theirs):
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            assert isinstance(connection.receive(limit=100), dict)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), plain, max_size=4), st.binary(max_size=2000), st.data())
def test_a_message_arrives_however_it_is_cut_up(
    message: dict[str, Any], data: bytes, cuts: st.DataObject
) -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as sender, closing(theirs):
        sender.send(message)
        sender.send_bytes(data)
        sender.abort()
        whole = b"".join(iter(lambda: theirs.recv(65536), b""))
    ends = sorted(cuts.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as receiver, closing(theirs):
        thread = threading.Thread(target=_send_cut, args=(theirs, whole, ends))
        thread.start()
        assert receiver.receive() == message
        back = bytearray(len(data))
        receiver.receive_into(back)
        thread.join()
        assert back == data
        assert receiver.stale  # the other side said that it is over


def _send_cut(sock: socket.socket, whole: bytes, ends: list[int]) -> None:
    for start, end in zip([0, *ends], [*ends, len(whole)], strict=True):
        sock.send(whole[start:end])
    sock.shutdown(socket.SHUT_WR)


def test_one_byte_now_and_then_takes_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    sock: Any = Trickle(clock, struct.pack("!I", 1000) + b"x" * 1000)
    connection, start = Connection(sock, timeout=50.5), clock.now
    with pytest.raises(TimeoutError):
        connection.receive()
    assert clock.now - start == 4 + 50.5  # the length, and then what can come in one timeout


def test_all_of_an_exchange_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    sock: Any = Trickle(clock, struct.pack("!I", 1000) + b"x" * 1000)
    connection, start = Connection(sock, timeout=50.5), clock.now
    with connection.within(10.5), connection.within(1000.0), pytest.raises(TimeoutError):
        connection.receive()
    assert clock.now - start == 10.5
    with pytest.raises(TimeoutError):
        connection.receive_into(bytearray(1000))
    assert clock.now - start == 10.5 + 50.5  # the limit was for that exchange


def test_descriptors_are_not_inherited_by_programs() -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, timeout=5.0)) as receiver, closing(theirs):
        receiver.allow_fds(2)
        with closing(Connection(theirs, timeout=5.0)) as sender:
            sender.send({}, fds=[0, 1])
            receiver.receive()
            fds = receiver.take_fds()
            assert len(fds) == 2
            assert not any(os.get_inheritable(fd) for fd in fds)
            for fd in fds:
                os.close(fd)
