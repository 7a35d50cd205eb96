"""What is no request of the protocol, and what a token has no right to."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from sapwood.channel.connection import Connection
from sapwood.channel.dial import dial_tcp, dial_unix
from sapwood.errors import BadName, Denied, ModelNotFound, NoRoom, StoreError, Unreachable
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Member, Members, PartRange, StaleMembers, VersionKey
from sapwood.repository.providers.link import split_address
from sapwood.repository.providers.placement import key_of
from sapwood.repository.providers.remote import RemoteProvider
from sapwood.repository.providers.session import _HANDLERS
from sapwood.repository.providers.wire import (
    BODY_LIMIT,
    PROTOCOL,
    error_of,
    head_to_body,
    join,
    split,
)
from tests.repository.providers.conftest import Host, connected
from tests.repository.providers.host import READER, STRANGER, TOKEN, WRITER
from tests.repository.providers.models import (
    head_of,
    load,
    proof,
    put,
    quiet,
    read,
    save,
    tensor,
    version_of,
)

SECRET = [tensor("secret", 300_000), tensor("small", 100)]
LIMIT = 2**30


@pytest.fixture
def address(host: Host) -> str:
    return host.serve("memory:")


@pytest.fixture
def owner(address: str) -> Iterator[RemoteProvider]:
    opened = connected(address)
    yield opened
    opened.close()


def works(address: str) -> None:
    """A well-formed client is served."""
    with closing(connected(address)) as provider:
        version = provider.reserve("works", None)
        put(provider, version, SECRET)
        assert read(provider, version, [key_of(SECRET[0])]) == [SECRET[0]]
        provider.drop_part(version)


def raw(address: str, *, token: str = TOKEN, hello: bool = True) -> Connection:
    connection = dial_tcp(*split_address(address), token, timeout=20.0)
    if hello:
        connection.send({"op": "hello", "client": "0123456789abcdef"})
        assert connection.receive()["protocol"] == PROTOCOL
    return connection


def refused(connection: Connection, message: dict[str, Any], body: bytes = b"") -> Exception:
    """The error that a request is answered with."""
    connection.send({**message, "body": len(body)})
    connection.send_bytes(body)
    answer = connection.receive()
    assert "error" in answer, answer
    return error_of(answer)


# -- not of the protocol -------------------------------------------------------------------------


def test_frames_that_are_none_end_their_connection_only(address: str) -> None:
    frames = [
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 70_000) + b"{",
        struct.pack("!I", 3) + b"abc",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 5000) + b"[" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(7).randbytes(5000),
        struct.pack("!I", 100) + b"{",
    ]
    for frame in frames:
        with closing(raw(address)) as connection:
            connection._sock.sendall(frame)
            with suppress(OSError):
                connection._sock.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while True:
                    assert "error" in connection.receive()
    works(address)


def test_bodies_that_are_announced_too_large_take_no_memory(address: str) -> None:
    for nbytes in (BODY_LIMIT + 1, 2**60, -1, "many", 1.5, None):
        with closing(raw(address)) as connection:
            connection.send({"op": "read_part", "body": nbytes})
            assert "at most" in str(error_of(connection.receive()))
            with pytest.raises(OSError):
                connection.receive()
    works(address)


def test_what_comes_before_the_greeting_is_refused(address: str) -> None:
    with closing(raw(address, hello=False)) as connection:
        assert "hello" in str(refused(connection, {"op": "members"}))
    with closing(raw(address, hello=False)) as connection:
        for client in ("short", "x" * 65, "no/letters-here!", 5, None):
            assert isinstance(refused(connection, {"op": "hello", "client": client}), StoreError)
    works(address)


ODD = (
    None, True, -1, 0, 1, 2**31, 2**60, 2**63, 2**64, 10**30, 1.5, 1e308, "", "a", "..", "a/../b",
    "a\0", "*" * 500,
    "\ud800", "x" * 3000, [], [1], ["a", "1", 7], ["a", "1", 2**80], ["../a", "1", 7],
    [["a", "1", 7]], [[]], {}, {"a": 1},
)  # fmt: skip
FIELDS = (
    "at", "name", "version", "same_as", "durability", "sealed", "epoch", "client", "members",
    "pattern", "after", "limit", "by", "lower", "id", "tag", "synced", "all", "quiet",
)  # fmt: skip


def odd_body(chance: random.Random) -> bytes:
    key = key_of(SECRET[0])
    huge = (2**60).to_bytes(8, "little") + bytes(16)
    parts = [
        b"", b"x", key, huge, key + huge, chance.randbytes(chance.randrange(100)), bytes(4), b"{}",
        join([]), join([b"", b""]), np.array([0], "<u4").tobytes(), b"\xff" * 40,
        key + (0).to_bytes(8, "little") + (2**60).to_bytes(8, "little"),
        key + (2**64 - 1).to_bytes(8, "little") * 2,
    ]  # fmt: skip
    body = join([chance.choice(parts) for _ in range(chance.randrange(6))])
    match chance.randrange(4):
        case 0:
            return body[: chance.randrange(len(body) + 1)]
        case 1:
            at = chance.randrange(len(body))
            return body[:at] + chance.randbytes(1) + body[at + 1 :]
    return body


@pytest.mark.parametrize("seed", range(4))
def test_odd_requests_are_answered_or_end_their_connection(address: str, seed: int) -> None:
    chance = random.Random(seed)
    connection = raw(address)
    try:
        for _ in range(300):
            op = chance.choice([*_HANDLERS, "nothing"])
            message = {name: chance.choice(ODD) for name in chance.sample(FIELDS, 9)}
            body = odd_body(chance)
            if chance.random() < 0.9:
                message["body"] = len(body)
            try:
                connection.send({"op": op, **message})
                connection.send_bytes(body)
                answer = connection.receive(limit=2**20)
                assert "log says more" not in str(answer), (op, message, body)
                left = answer.get("body", 0) + (answer.get("nbytes") or 0)
                connection.receive_into(bytearray(left))
                if op == "put_part" and answer.get("wanted"):
                    raise ConnectionError("it waits for bytes")
            except OSError:
                connection.close()
                connection = raw(address)
    finally:
        connection.close()
    works(address)


def test_random_bodies_are_no_heads(address: str, owner: RemoteProvider) -> None:
    chance = random.Random(1)
    good = head_to_body(head_of(VersionKey("a", "1", 77), SECRET, metrics={"x": 1.0}, tags=["t"]))
    with closing(raw(address)) as connection:
        for _ in range(300):
            body = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            connection.send({"op": "put_head", "body": len(body)})
            connection.send_bytes(body)
            answer = connection.receive()
            assert "log says more" not in str(answer), bytes(body)
            if "error" not in answer:  # what was hit has no meaning: a digit of a note, a mark
                owner.remove_head(version_of(owner.models("*")[0]))
        about = json.loads(split(good)[0])
        for change in (
            {"metrics": {"x": float("nan")}},
            {"metrics": {"x": 10**400}},
            {"metrics": {"x": "1"}},
            {"tags": ["../x"]},
            {"tags": [5]},
            {"layer_bytes": [1]},
            {"id": 2**63},
            {"id": True},
            {"name": "a/../b"},
            {"parent": 5},
            {"parent": -1, "parent_name": "a"},
            {"parent": 5, "parent_name": "a\n"},
            {"note": []},
        ):
            body = join([json.dumps({**about, **change}).encode(), *split(good)[1:]])
            assert isinstance(refused(connection, {"op": "put_head"}, body), (StoreError, BadName))
    assert owner.models("*") == []
    works(address)


def test_more_than_fits_is_refused_before_it_is_sent(address: str) -> None:
    for nbytes in (LIMIT + 1, 2**40, 2**60):
        key = nbytes.to_bytes(8, "little") + bytes(16)
        with closing(raw(address)) as connection:
            message = {"op": "put_part", "at": ["a", "1", 7], "durability": 0}
            for sealed in (False, True):
                error = refused(connection, {**message, "sealed": sealed}, join([key, b"", b""]))
                assert isinstance(error, NoRoom)
    works(address)


def near(address: str) -> Connection:
    with closing(raw(address, hello=False)) as connection:
        connection.send({"op": "hello", "client": "0123456789abcdef"})
        unix = connection.receive()["unix"]
    connection = dial_unix(unix, TOKEN, timeout=20.0)
    connection.allow_fds(8)
    connection.send({"op": "hello", "client": "0123456789abcdef"})
    connection.receive()
    return connection


def test_memory_that_could_change_is_not_taken(address: str, owner: RemoteProvider) -> None:
    data = SECRET[0]
    body = join([key_of(data), b"", b""])
    message = {"op": "put_part", "at": ["a", "1", 7], "durability": 0, "sealed": True}
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        for passed in ([fd], [], [fd, fd]):
            with closing(near(address)) as connection:
                connection.send({**message, "body": len(body)})
                connection.send_bytes(body)
                assert connection.receive()["wanted"] == 1
                connection.receive_into(bytearray(12))
                connection.send({"sealed": len(data)}, passed)
                # Of two, the one more is dropped on the way: what is left is not sealed either.
                assert "error" in connection.receive()
        assert owner.parts() == []
    finally:
        os.close(fd)
    works(address)


def test_a_client_that_leaves_half_way_leaves_nothing(address: str, owner: RemoteProvider) -> None:
    key = (LIMIT // 2 + 1).to_bytes(8, "little") + bytes(16)
    body = join([key, b"", b""])
    for _ in range(3):  # if its room were not given back, the second one would be refused
        with closing(raw(address)) as connection:
            connection.send({"op": "reserve", "name": "a", "version": "1"})
            at = connection.receive()["at"]
            connection.send({"op": "put_part", "at": at, "durability": 0, "body": len(body)})
            connection.send_bytes(body)
            assert connection.receive()["wanted"] == 1
            connection.receive_into(bytearray(12))
            connection.send_bytes(bytes(100_000))
        wait_until_free(owner)
    assert owner.parts() == []
    assert owner.gc(quiet=0.0, said=quiet).live == 0


def wait_until_free(owner: RemoteProvider) -> None:
    """The provider hears of the client's end a moment later."""
    for _ in range(2000):
        with suppress(StoreError):
            owner.remove_head(owner.reserve("a", "1"))
            return
    raise AssertionError("what the client had reserved was not given up")


# -- rights --------------------------------------------------------------------------------------


def test_a_token_that_nobody_knows(address: str) -> None:
    with (
        closing(connected(address, STRANGER)) as stranger,
        pytest.raises(Denied, match="this token"),
    ):
        stranger.members()


def test_a_reader_reads_what_it_may_and_changes_nothing(
    address: str, owner: RemoteProvider
) -> None:
    mine = version_of(save(owner, "a/x", "1", SECRET))
    with closing(connected(address, READER)) as reader:
        assert load(reader, "a/x@1") == SECRET
        assert reader.has_head(mine)
        attempts = [
            lambda: reader.reserve("a/y", "1"),
            lambda: put(reader, VersionKey("a/y", "1", 7), SECRET),
            lambda: reader.put_head(head_of(VersionKey("a/y", "1", 7), []), synced=False),
            lambda: reader.drop_part(mine),
            lambda: reader.remove_head(mine),
            lambda: reader.tag(mine_reference, "best"),
            lambda: reader.untag("a/x", "best"),
        ]
        mine_reference = Reference("a/x", "1")
        for attempt in attempts:
            with pytest.raises(Denied, match=r"'reader' has no '(write|delete)' right to 'a/[xy]'"):
                attempt()
        for attempt in (
            lambda: reader.gc(quiet=0.0, said=quiet),
            lambda: reader.verify(said=quiet),
            lambda: reader.take_members(Members(epoch=9, members=(Member("x", "h:1"),))),
        ):
            with pytest.raises(Denied, match="'admin' right to all models"):
                attempt()
    assert load(owner, "a/x@1") == SECRET
    assert owner.members().epoch == 0


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_what_a_token_may_not_read_is_not_seen(
    address: str, owner: RemoteProvider, way: str
) -> None:
    secret = version_of(
        save(owner, "b", "1", SECRET, layers={b"layer": 5}, configs={b"digest": b"config"})
    )
    with closing(connected(address, WRITER, way)) as writer:
        save(writer, "a/x", "1", [b"mine"], layers={b"layer": 5}, parent=secret.id, parent_name="b")
        assert [one.name for one in writer.models("*")] == ["a/x"]
        assert [part.version.name for part in writer.parts()] == ["a/x"]
        assert writer.children(secret.id)[0].name == "a/x"
        assert [one.record.name for one in writer.kin([b"layer"], "*", 9, None, False)] == ["a/x"]
        assert writer.configs([b"digest"]) == [None]
        keys = [key_of(data) for data in SECRET]
        mine = VersionKey("a/y", "1", 99)
        if way == "unix":
            with pytest.raises(Denied, match="'writer' has no 'read' right"):
                writer.map_part(secret, keys)
        for attempt in (
            lambda: load(writer, "b@1"),
            lambda: read(writer, secret, keys),
            lambda: writer.find(Reference("b")),
            lambda: writer.find(Reference("nobody/has/it")),
            lambda: writer.by_id(secret.id, "b"),
            lambda: writer.has_head(secret),
            lambda: put(writer, mine, SECRET, same_as={0: proof(secret, SECRET[0])}),
        ):
            with pytest.raises(Denied, match="'writer' has no 'read' right"):
                attempt()
        # Its number under another name is another version, and to know a key grants nothing.
        out = memoryview(bytearray(10))
        false = VersionKey("a/x", "1", secret.id)
        assert writer.read_part(false, [PartRange(keys[0], 0, out)]) == [0]
        assert put(writer, mine, SECRET, same_as={0: proof(false, SECRET[0])}) == [0]
        with pytest.raises(ModelNotFound) as told:
            writer.find(Reference("a/b"))
        assert "did you mean" not in str(told.value)


def test_memory_is_passed_only_to_who_may_read_all_of_it(
    address: str, owner: RemoteProvider
) -> None:
    shared, other = tensor("shared", 400_000), tensor("other", 400_000)
    save(owner, "b", "1", [shared, other])
    owner.flush()
    save(owner, "a/x", "1", [shared])
    owner.flush()  # what a/x has lies among the bytes of b now
    mine = save(owner, "a/y", "1", [other[::-1]])
    version = version_of(owner.find(Reference("a/x")))
    with (
        closing(connected(address, READER, "unix")) as reader,
        closing(connected(address, TOKEN, "unix")) as all_of_it,
    ):
        assert reader.map_part(version, [key_of(shared)]) is None
        assert read(reader, version, [key_of(shared)]) == [shared]
        found = all_of_it.map_part(version, [key_of(shared)])
        assert found is not None
        assert bytes(found[key_of(shared)]) == shared
        found = reader.map_part(version_of(mine), [key_of(other[::-1])])
        assert found is not None
        assert bytes(found[key_of(other[::-1])]) == other[::-1]


def test_a_writer_gives_up_what_it_has_not_saved(address: str, owner: RemoteProvider) -> None:
    with closing(connected(address, WRITER)) as writer:
        version = writer.reserve("a/x", "1")
        put(writer, version, SECRET)
        writer.drop_part(version)
        writer.remove_head(version)
        assert owner.parts() == []
        saved = version_of(save(writer, "a/x", "1", SECRET))
        for attempt in (lambda: writer.drop_part(saved), lambda: writer.remove_head(saved)):
            with pytest.raises(Denied, match="'delete'"):
                attempt()
        assert load(writer, "a/x@1") == SECRET


# -- members -------------------------------------------------------------------------------------


def test_a_client_with_an_older_list_is_told(address: str, owner: RemoteProvider) -> None:
    members = Members(epoch=4, members=(Member("p0", address),))
    owner.take_members(members)
    owner.epoch = 3
    for attempt in (lambda: owner.models("*"), lambda: owner.reserve("a", "1")):
        with pytest.raises(StaleMembers) as told:
            attempt()
        assert told.value.members == members
    assert owner.members() == members
    for epoch in (4, 5, None):
        owner.epoch = epoch
        assert owner.models("*") == []


def test_nobody_there(host: Host) -> None:
    address = host.serve("memory:")
    host.close()
    with (
        closing(connected(address)) as provider,
        pytest.raises(Unreachable, match=address.replace(".", r"\.")),
    ):
        provider.members()
