"""Who is let into a transfer, and that strangers keep nobody out."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from sapwood.transport import _meet
from sapwood.transport._meet import HELLO, Deadline, accept
from sapwood.transport.base import Ends

TOKEN = b"t" * 32
ENDS = Ends(me=0, donors=1, hosts=("127.0.0.1",) * 3, timeout=60.0)


class Meeting:
    """A listener, and all who have come to it."""

    def __init__(self, stack: ExitStack, kind: str) -> None:
        self.stack = stack
        if kind == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        else:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.listener.bind("")
            self.listener.listen(1024)
        stack.enter_context(self.listener)
        self.wires: dict[int, socket.socket] = {}

    def come(self, said: bytes = b"") -> socket.socket:
        sock = socket.socket(self.listener.family, self.listener.type)
        sock.settimeout(20.0)
        sock.connect(self.listener.getsockname())
        if said:
            sock.send(said)
        return self.stack.enter_context(sock)

    def accept(self, seconds: float = 60.0) -> float:
        """The seconds that are left."""
        deadline = Deadline(seconds)
        accept(self.listener, TOKEN, ENDS, deadline, self.wires)
        for wire in self.wires.values():
            self.stack.enter_context(wire)
        return deadline.left


@pytest.fixture(params=["tcp", "unix"])
def meeting(request: pytest.FixtureRequest) -> object:
    with ExitStack() as stack:
        yield Meeting(stack, request.param)


@pytest.mark.parametrize("silent", [40, 400])
def test_silent_strangers_keep_nobody_out(meeting: Meeting, silent: int) -> None:
    """Two seconds for each of them would be more than there are."""
    strangers = [meeting.come() for _ in range(silent)]
    ours = [meeting.come(HELLO.pack(number, TOKEN)) for number in (2, 1)]
    assert meeting.accept()
    assert sorted(meeting.wires) == [1, 2]
    meeting.wires[1].sendall(b"x")
    assert ours[1].recv(1) == b"x"
    assert all(not one.recv(1) for one in strangers)


@pytest.mark.parametrize(
    "said",
    [
        b"x",
        HELLO.pack(1, b"u" * 32),
        HELLO.pack(0, TOKEN),  # a donor
        HELLO.pack(3, TOKEN),
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    ],
)
def test_others_are_sent_away(meeting: Meeting, said: bytes) -> None:
    stranger = meeting.come(said)
    stranger.shutdown(socket.SHUT_WR)
    for number in (1, 2):
        meeting.come(HELLO.pack(number, TOKEN))
    twin = meeting.come(HELLO.pack(1, TOKEN))
    meeting.accept()
    assert sorted(meeting.wires) == [1, 2]
    for one in (stranger, twin):
        with suppress(ConnectionResetError):
            assert not one.recv(100)


def test_a_greeting_in_pieces(meeting: Meeting) -> None:
    if meeting.listener.type == socket.SOCK_SEQPACKET:
        pytest.skip("it has messages")
    hello = HELLO.pack(1, TOKEN)
    one = meeting.come(hello[:5])
    meeting.come(HELLO.pack(2, TOKEN))
    thread = threading.Thread(target=meeting.accept)
    thread.start()
    for byte in hello[5:]:
        time.sleep(0.001)
        one.sendall(bytes([byte]))
    thread.join(60.0)
    assert sorted(meeting.wires) == [1, 2]


def test_who_does_not_come_is_missed_in_time(meeting: Meeting) -> None:
    meeting.come()
    with pytest.raises(TimeoutError):
        meeting.accept(0.05)
    assert not meeting.wires


def test_of_too_many_the_first_is_sent_away(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_meet, "_STRANGERS", 0)
    strangers = [meeting.come() for _ in range(20)]
    for number in (1, 2):
        meeting.come(HELLO.pack(number, TOKEN))
    meeting.accept()
    assert sorted(meeting.wires) == [1, 2]
    assert not strangers[0].recv(1)
