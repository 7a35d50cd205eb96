"""Messages between neighbours, in one process: the other end is a plain socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sapwood.runtime.machines import Links
from sapwood.sync.averaging.messages import Kind, Message, receive, send
from sapwood.sync.averaging.neighbours import Neighbours

BOUND = 30.0


class Ends:
    """Neighbours of one rank, which is number 7, and what they were told."""

    def __init__(self) -> None:
        ours, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.messages: list[Message] = []
        self.lost: list[Exception] = []
        self.failed: list[Exception] = []
        self.came = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.neighbours = Neighbours(
            Links({7: ours}), self.take, self.progress, self.lose, self.fail
        )

    def take(self, rank: int, message: Message) -> None:
        assert rank == 7
        self.messages.append(message)
        self.came.release()

    def progress(self) -> None:
        self.gate.wait(BOUND)

    def lose(self, rank: int, error: Exception) -> None:
        self.lost.append(error)
        self.came.release()

    def fail(self, error: Exception) -> None:
        self.failed.append(error)
        self.came.release()

    def wait(self) -> None:
        assert self.came.acquire(timeout=BOUND)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.gate.set()
    made.neighbours.close(Message(Kind.LEAVING), 0.0)
    made.there.close()


def hear(link: socket.socket, count: int) -> list[Message]:
    found = []
    for _ in range(count):
        link.settimeout(BOUND)
        link.recv(1, socket.MSG_PEEK)
        link.setblocking(False)
        found.append(receive(link))
    return found


def test_messages_travel_in_order_with_their_descriptor(ends: Ends) -> None:
    read, write = os.pipe()
    sent = [Message(Kind.POSTED, 1, 2, 3, 2**40), Message(Kind.RESULT, 1, descriptor=read)]
    for message in sent:
        send(ends.there, message)
        ends.wait()
    os.close(read)
    assert ends.messages[0] == sent[0]
    os.write(write, b"through")
    assert os.read(ends.messages[1].descriptor, 10) == b"through"
    os.close(write)
    os.close(ends.messages[1].descriptor)


def test_telling_never_waits_and_loses_nothing(ends: Ends) -> None:
    sent = [Message(Kind.POSTED, 1, bucket) for bucket in range(500)]
    for message in sent:
        ends.neighbours.tell(message)  # nobody reads
    closing = threading.Thread(
        target=ends.neighbours.close, args=(Message(Kind.LEAVING), BOUND), daemon=True
    )
    closing.start()
    heard = hear(ends.there, 501)
    closing.join(BOUND)
    assert heard[:-1] == sent
    assert heard[-1].kind is Kind.LEAVING
    assert not closing.is_alive()


def test_the_end_of_a_connection_is_a_death_without_a_farewell(ends: Ends) -> None:
    for bucket in range(500):
        ends.neighbours.tell(Message(Kind.POSTED, 1, bucket))
    ends.there.close()
    ends.wait()
    start = time.monotonic()
    ends.neighbours.close(Message(Kind.LEAVING), BOUND)
    assert time.monotonic() - start < BOUND  # what was not sent to the dead is not waited for
    assert "rank 7's connection on this machine ended" in str(ends.lost[0])


def test_a_farewell_counts_though_our_last_words_were_not_read(ends: Ends) -> None:
    ends.gate.clear()
    ends.neighbours.wake()  # the thread is busy while the rank leaves
    ends.neighbours.tell(Message(Kind.POSTED, 1))
    send(ends.there, Message(Kind.SUMMED, 1))
    send(ends.there, Message(Kind.LEAVING))
    ends.there.close()  # with our message unread: the kernel calls that a reset
    ends.neighbours.tell(Message(Kind.POSTED, 2))
    ends.gate.set()
    ends.wait()
    ends.neighbours.close(Message(Kind.LEAVING), BOUND)
    assert [m.kind for m in ends.messages] == [Kind.SUMMED]
    assert ends.lost == []
    assert ends.neighbours.left(7)


@pytest.mark.parametrize("raw", [b"x", b"\xff" * 24, b"\1" * 40])
def test_a_message_of_an_unknown_form_is_an_error(ends: Ends, raw: bytes) -> None:
    ends.there.send(raw)
    ends.wait()
    assert "unknown form" in str(ends.lost[0])


def test_an_error_of_our_own_is_not_a_lost_neighbour(ends: Ends) -> None:
    ends.neighbours._progress = lambda: 1 / 0  # type: ignore[assignment]
    ends.neighbours.wake()
    ends.wait()
    assert isinstance(ends.failed[0], ZeroDivisionError)
    assert ends.lost == []
