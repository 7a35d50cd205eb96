"""Messages between ranks and engines: whole ones arrive, anything else is refused."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.checkpoint.engine.base import Job
from sapwood.checkpoint.engine.messages import from_job, from_plan, to_job, to_plan
from sapwood.checkpoint.engine.wire import MAX_BODY, VERSION, Closed, Late, Wire, WireError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.shards import plan_shards
from sapwood.tiers.record import CheckpointId

Pair = tuple[Wire, Wire, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX)
    wires = Wire(left, send_timeout=0.2), Wire(right, send_timeout=0.2)
    wires[1].patience(5.0)
    yield *wires, left
    for wire in wires:
        wire.close()


def test_a_message_arrives_with_its_descriptor(pair: Pair) -> None:
    here, there, _ = pair
    reader, writer = os.pipe()
    here.send({"op": "lend", "arena": 3}, [writer])
    message, (copy,) = there.receive()
    assert message == {"op": "lend", "arena": 3}
    assert not os.get_inheritable(copy)
    os.write(copy, b"through")
    assert os.read(reader, 100) == b"through"
    for fd in (reader, writer, copy):
        os.close(fd)


def test_messages_keep_their_order_and_their_own_descriptors(pair: Pair) -> None:
    here, there, _ = pair
    for number in range(20):
        fd = os.memfd_create(f"m{number}")
        os.write(fd, str(number).encode())
        here.send({"op": "x", "n": number}, [fd] if number % 3 else [])
        os.close(fd)
    for number in range(20):
        message, fds = there.receive()
        assert message["n"] == number
        assert len(fds) == bool(number % 3)
        for fd in fds:
            assert os.pread(fd, 10, 0) == str(number).encode()
            os.close(fd)


def test_a_large_message_arrives(pair: Pair) -> None:
    here, there, _ = pair
    text = "x" * 3_000_000
    sender = threading.Thread(target=here.send, args=({"op": "plan", "text": text},))
    sender.start()
    assert there.receive()[0]["text"] == text
    sender.join(5)


def head(magic: bytes = b"SWCE", version: int = VERSION, fds: int = 0, length: int = 0) -> bytes:
    return struct.pack("!4sHHI", magic, version, fds, length)


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a message"),
        (head(version=7), "version 7"),
        (head(length=MAX_BODY + 1), "is refused"),
        (head(fds=1, length=2) + b"{}", "is refused"),
        (head(length=4) + b"{}", "broke off"),
        (head()[:5], "broke off"),
        (head(length=3) + b"{x}", "not JSON"),
        (head(length=2) + b"[]", "what it is about"),
        (head(length=8) + b'{"op":1}', "what it is about"),
        (head(length=60_000) + b"[" * 60_000, "not JSON"),
        (head(length=2) + b"\xff\xfe", "not JSON"),
    ],
)
def test_anything_else_is_refused(pair: Pair, sent: bytes, match: str) -> None:
    here, there, raw = pair
    raw.sendall(sent)
    here.shut()
    with pytest.raises(WireError, match=match) as found:
        there.receive()
    assert not isinstance(found.value, Closed)


@given(st.binary(max_size=200))
def test_whatever_bytes_come_nothing_else_is_raised(content: bytes) -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    wire = Wire(right, send_timeout=1)
    with left:
        left.sendall(content)
    with pytest.raises(WireError):
        receive_all(wire)
    wire.close()


def receive_all(wire: Wire) -> None:
    for _ in range(100):
        wire.receive()


def test_refused_messages_leave_no_descriptor_behind(pair: Pair) -> None:
    _, there, raw = pair
    fd = os.memfd_create("extra")
    before = len(list(Path("/proc/self/fd").iterdir()))
    socket.send_fds(raw, [head(fds=3, length=2) + b"{}"], [fd, fd, fd])
    with pytest.raises(WireError, match="descriptors"):
        there.receive()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(fd)


def test_the_end_is_told_apart_from_a_break(pair: Pair) -> None:
    here, there, _ = pair
    here.send({"op": "goodbye"})
    here.shut()
    assert there.receive()[0]["op"] == "goodbye"
    with pytest.raises(Closed):
        there.receive()


def test_who_does_not_answer_or_read_is_not_waited_for(pair: Pair) -> None:
    here, there, _ = pair
    there.patience(0.05)
    with pytest.raises(Late, match="did not answer"):
        there.receive()
    with pytest.raises(Late, match="does not read"):
        send_much(here)


def send_much(wire: Wire) -> None:
    for _ in range(1000):
        wire.send({"op": "x", "text": "x" * 100_000})


def test_a_message_that_is_too_big_is_not_even_sent(pair: Pair) -> None:
    here, there, _ = pair
    with pytest.raises(WireError, match="too big"):
        here.send({"op": "x", "text": "x" * MAX_BODY})
    here.send({"op": "y"})
    assert there.receive()[0] == {"op": "y"}


def test_a_shard_is_handed_over_in_a_few_bytes_however_many_tensors_it_has() -> None:
    def job(count: int) -> Job:
        entries = (
            Entry(file="model", name=f"layer.{n}.weight", dtype="F32", shape=(8, 8), holders=(0,))
            for n in range(count)
        )
        plan = plan_shards(Catalog(tuple(entries)), 1)
        id = CheckpointId(1, "0a1b2c")
        return Job(
            id=id, rank=0, arena=0, plan=plan, created=1.0, extras={"step": 1}, tiers=("memory",)
        )

    few, many = job(1), job(5000)
    assert from_job(few, 1) == from_job(many, 1)
    assert len(json.dumps(from_job(many, 1))) < 300
    again = to_plan(json.loads(json.dumps(from_plan(1, many.plan, 0))))
    assert again == many.plan
    assert to_job(json.loads(json.dumps(from_job(many, 1))), again) == many
