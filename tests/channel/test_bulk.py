"""Many bytes at once: several buffers as one, and parts of files."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sapwood.channel.connection import ChannelError, Connection, Ended
from tests.channel.places import Place

SIZES = (0, 1, 5, 70_000, 0, 3 * 2**20 + 1, 9 * 2**20, 100)
BYTES = random.Random(0).randbytes(sum(SIZES))


@pytest.fixture(params=["unix", "tcp", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    taken: list[Connection] = []
    come, go = threading.Event(), threading.Event()

    def serve(connection: Connection) -> None:
        taken.append(connection)
        come.set()
        go.wait(60)

    place = Place(request.param, serve)
    with closing(place.dial()) as ours:
        assert come.wait(20)
        yield ours, taken[0]
    go.set()
    place.listener.close()


def side_by_side(one: Callable[[], None], other: Callable[[], None]) -> None:
    thread = threading.Thread(target=one)
    thread.start()
    other()
    thread.join()


def parts_of(data: bytes | bytearray) -> list[memoryview]:
    parts, at = [], 0
    for size in SIZES:
        parts.append(memoryview(data)[at : at + size])
        at += size
    return parts


def test_several_buffers_are_as_one(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    for sending, receiving in ((ours, theirs), (theirs, ours)):
        out = bytearray(len(BYTES))
        side_by_side(
            lambda sending=sending: sending.send_gathered(parts_of(BYTES)),  # type: ignore[misc]
            lambda receiving=receiving, out=out: receiving.receive_scattered(parts_of(out)),  # type: ignore[misc]
        )
        assert out == BYTES
        # What is said in between is still in step.
        sending.send({"all": True})
        assert receiving.receive() == {"all": True}


def test_thousands_of_small_buffers(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    out = bytearray(3000 * 7)
    rows = [memoryview(out)[at : at + 7] for at in range(0, len(out), 7)]
    data = BYTES[: len(out)]
    side_by_side(
        lambda: ours.send_gathered([data[at : at + 11] for at in range(0, len(data), 11)]),
        lambda: theirs.receive_scattered(rows),
    )
    assert out == data


def test_a_part_of_a_file(pair: tuple[Connection, Connection], tmp_path: Path) -> None:
    ours, theirs = pair
    (tmp_path / "file").write_bytes(BYTES)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        out = bytearray(len(BYTES) - 110)
        side_by_side(
            lambda: ours.send_range(fd, 100, len(out)), lambda: theirs.receive_scattered([out])
        )
        assert out == BYTES[100:-10]
        ours.send_range(fd, 5, 0)
        with pytest.raises(ChannelError, match="shorter"):
            ours.send_range(fd, len(BYTES) - 5, 10)
    finally:
        os.close(fd)


def test_one_that_leaves_half_way(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    ours.send_bytes(b"some")
    ours.abort()
    with pytest.raises((Ended, OSError)):
        theirs.receive_scattered([bytearray(100), bytearray(2**22)])


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Connection]]:
    """A socket of which nothing is read or said, and the other end."""
    if request.param == "unix":
        raw, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            raw = socket.create_connection(server.getsockname())
            other, _ = server.accept()
    connection = Connection(other, timeout=0.2)
    yield raw, connection
    raw.close()
    connection.close()


def test_one_that_says_or_takes_nothing_is_too_slow(
    ends: tuple[socket.socket, Connection],
) -> None:
    raw, connection = ends
    with pytest.raises(TimeoutError):
        connection.receive_scattered([bytearray(100)])
    raw.sendall(b"x" * 50)
    with pytest.raises(TimeoutError):
        connection.receive_scattered([bytearray(100), bytearray(2**21)])
    with pytest.raises(TimeoutError):
        connection.send_gathered([bytes(2**26)])
    connection.timeout = 20.0
    with connection.within(0.1), pytest.raises(TimeoutError):
        connection.receive_scattered([bytearray(100)])
    with connection.within(0.0), pytest.raises(TimeoutError):
        connection.receive_scattered([bytearray(1)])


def test_a_byte_now_and_then_holds_nobody_up(ends: tuple[socket.socket, Connection]) -> None:
    raw, connection = ends
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.02):
            raw.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive_scattered([bytearray(2**21)])
    ended.set()
    thread.join()
    assert time.monotonic() - began < 60.0  # it would take hours


def test_waiting_ends_when_it_is_aborted(ends: tuple[socket.socket, Connection]) -> None:
    _, connection = ends
    connection.timeout = 100.0
    timer = threading.Timer(0.1, connection.abort)
    timer.start()
    with pytest.raises(OSError):
        connection.receive_scattered([bytearray(100)])
    timer.join()
