"""The server nodes keep blobs with: what it does, whom it refuses, and that it goes on."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood.channel.connection import BLOCK_BYTES, MESSAGE_LIMIT, Connection
from sapwood.channel.handshake import PROTOCOL, greet_server
from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.testing.faults import inject
from sapwood.tiers.answers import RECORD_LIMIT
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.keeper import Blob
from sapwood.tiers.peer import Peer
from sapwood.tiers.peers import PeerServer
from tests.tiers.nodes import TOKEN, Process

BLOB = Blob("area", "group", "name")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    with PeerServer(tmp_path / "kept", TOKEN, timeout=1.0) as started:
        yield started


@pytest.fixture
def peer(server: PeerServer) -> Iterator[Peer]:
    with closing(Peer("b", server.address, TOKEN, timeout=2.0)) as made:
        yield made


def send(peer: Peer, blob: Blob, data: bytes, record: bytes = b"{}") -> None:
    with closing(peer.put(blob, len(data))) as sink:
        sink.write(data)
        sink.seal(record)
        sink.wait()


def fetch(peer: Peer, blob: Blob, start: int, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    peer.ask(blob, start, nbytes).into(out)
    return bytes(out)


def raw(server: PeerServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def greeted(server: PeerServer) -> tuple[Connection, socket.socket]:
    sock = raw(server)
    connection = Connection(sock, timeout=5.0)
    greet_server(connection, TOKEN)
    return connection, sock


def ended(sock: socket.socket) -> bytes:
    """What the server said before it ended the connection."""
    said = b""
    while True:
        try:
            more = sock.recv(65536)
        except ConnectionResetError:
            return said
        if not more:
            return said
        said += more


# -- what it does ----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
def test_a_blob_comes_back(peer: Peer, nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    send(peer, BLOB, data[:nbytes], b"a record")
    assert list(peer.names("area")) == [BLOB]
    assert peer.record(BLOB) == b"a record"
    assert peer.size(BLOB) == nbytes
    assert fetch(peer, BLOB, 0, nbytes) == data[:nbytes]
    assert fetch(peer, BLOB, nbytes // 2, nbytes - nbytes // 2) == data[nbytes // 2 : nbytes]


def test_areas_and_groups_are_apart(peer: Peer) -> None:
    blobs = [Blob(a, g, n) for a in "xy" for g in "12" for n in "pq"]
    for blob in blobs:
        send(peer, blob, blob.name.encode())
    assert list(peer.names("x")) == blobs[:4]
    assert list(peer.names("x", "2")) == blobs[2:4]
    peer.drop("x", "2")
    peer.drop("x", "2")
    assert list(peer.names("x")) == blobs[:2]
    assert list(peer.names("y")) == blobs[4:]
    assert list(peer.names("z")) == []


def test_what_is_not_there_is_an_answer_and_not_the_end(peer: Peer) -> None:
    for call in (peer.size, peer.record, lambda blob: fetch(peer, blob, 0, 1)):
        with pytest.raises(CheckpointError, match="No such file"):
            call(BLOB)
    send(peer, BLOB, b"12345")
    for start, nbytes in ((0, 6), (5, 1), (10, 0)):
        with pytest.raises(CheckpointError, match="truncated"):
            fetch(peer, BLOB, start, nbytes)
    assert fetch(peer, BLOB, 1, 3) == b"234"


def test_names_that_could_leave_the_folder_are_refused(peer: Peer, tmp_path: Path) -> None:
    outside = str(tmp_path / "outside")
    for name in ("", ".", "..", "../x", "a/b", outside, ".hidden", "a\0b", "x" * 200, "ä"):
        for blob in (Blob(name, "g", "n"), Blob("a", name, "n"), Blob("a", "g", name)):
            with pytest.raises(CheckpointError, match="is no name"):
                peer.put(blob, 0)
            with pytest.raises(CheckpointError, match="is no name"):
                peer.size(blob)
        with pytest.raises(CheckpointError, match="is no name"):
            peer.drop("a", name)
    peer.ping()
    assert not list(tmp_path.rglob("*.bin"))


def test_a_blob_is_not_there_before_its_record_is(peer: Peer, server: PeerServer) -> None:
    connection, sock = greeted(server)
    request = {"op": "put", "area": "area", "group": "group", "name": "name", "nbytes": 10}
    connection.send(request)
    assert connection.receive() == {"ok": True}
    connection.send_bytes(b"0123456789")
    assert list(peer.names("area")) == []
    sock.close()
    assert list(peer.names("area")) == []
    send(peer, BLOB, b"abc")
    assert fetch(peer, BLOB, 0, 3) == b"abc"


def test_what_was_begun_and_left_is_cleared_away(server: PeerServer, peer: Peer, tmp_path) -> None:
    peer.put(BLOB, 100).close()
    deadline = time.monotonic() + 5
    while any((tmp_path / "kept" / "area" / "group").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_fails_half_way_is_reported_to_the_sender(peer: Peer) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    data = bytes(3 * BLOCK_BYTES)
    with (
        inject("files", full, at=1, when=lambda op, **_: op == "write"),
        pytest.raises(TierError, match=r"node b .*No space left"),
    ):
        send(peer, BLOB, data)
    assert list(peer.names("area")) == []
    send(peer, BLOB, data)
    assert peer.size(BLOB) == len(data)


def test_a_failure_of_any_file_operation_leaves_a_whole_blob_or_none(tmp_path: Path) -> None:
    def fail(**_: object) -> None:
        raise OSError(5, "Input/output error")

    for number in range(1, 100):
        folder = BlobFolder(tmp_path / str(number))
        try:
            with inject("files", fail, at=number), closing(folder.put(BLOB, 3)) as sink:
                sink.write(b"abc")
                sink.seal(b"{}")
        except TierError:
            for blob in folder.names("area"):  # only if the record was there before it failed
                out = bytearray(3)
                folder.ask(blob, 0, 3).into(out)
                assert (out, folder.record(blob)) == (b"abc", b"{}")
        else:
            assert number > 10
            return
    pytest.fail("every file operation failed")


def test_a_blob_of_another_size_than_was_said_is_not_kept(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    with closing(folder.put(BLOB, 4)) as sink:
        sink.write(b"abc")
        with pytest.raises(TierError, match="has 4 bytes, but 3 were given"):
            sink.seal(b"{}")
    assert list(tmp_path.rglob("*name*")) == []


def test_many_clients_at_once(server: PeerServer) -> None:
    failures = []

    def work(number: int) -> None:
        try:
            with closing(Peer("b", server.address, TOKEN)) as mine:
                blob = Blob("area", "group", f"n{number}")
                send(mine, blob, bytes([number]) * 100_000)
                assert fetch(mine, blob, 0, 100_000) == bytes([number]) * 100_000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_more_clients_than_it_takes_are_told_so(tmp_path: Path) -> None:
    with PeerServer(tmp_path, TOKEN, connections=1) as server:
        first, second = Peer("b", server.address, TOKEN), Peer("b", server.address, TOKEN)
        first.ping()
        with pytest.raises(TierError, match="all 1 connections are in use"):
            second.ping()
        first.close()
        deadline = time.monotonic() + 5
        while True:
            try:
                second.ping()
                break
            except TierError:
                assert time.monotonic() < deadline
        second.close()


def test_connections_are_used_again_and_made_again(tmp_path: Path) -> None:
    process = Process(tmp_path / "kept")
    port = int(process.address.rsplit(":", 1)[1])
    try:
        peer = Peer("b", process.address, TOKEN, timeout=2.0)
        send(peer, BLOB, b"abc")
        process.close()
        with pytest.raises(TierError, match="cannot be reached"):
            peer.ping()
        with PeerServer(tmp_path / "kept", TOKEN, port=port) as server:
            assert fetch(peer, BLOB, 0, 3) == b"abc"
            server.close()
            server.close()
        peer.close()
    finally:
        process.close()


# -- whom it refuses -------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_the_server_goes_on(server: PeerServer, peer: Peer) -> None:
    for token in ("", "another", TOKEN + " ", TOKEN.upper()):
        with closing(Peer("b", server.address, token)) as stranger:
            with pytest.raises(TierError, match="wrong token; all nodes must be given the same"):
                stranger.ping()
            with pytest.raises(TierError, match="wrong token"):
                stranger.put(BLOB, 3)
    peer.ping()


def test_the_token_is_never_sent_and_a_proof_cannot_be_used_twice(server: PeerServer) -> None:
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as fake:
        host, port = fake.getsockname()

        def listen() -> None:
            sock, _ = fake.accept()
            with sock:
                hello = json.dumps({"protocol": PROTOCOL, "nonce": "00" * 16}).encode()
                sock.sendall(struct.pack("!I", len(hello)) + hello)
                heard.append(sock.recv(4096))
                sock.sendall(struct.pack("!I", 2) + b"{}")

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(TierError, match="does not know the token itself"):
            Peer("b", f"{host}:{port}", TOKEN).ping()
        thread.join(5)
    assert heard
    assert TOKEN.encode() not in heard[0]
    with raw(server) as sock:
        sock.sendall(heard[0])  # what was heard, played back
        assert b"wrong token" in ended(sock)


def test_a_server_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        PeerServer(tmp_path, "")


def test_an_address_that_is_taken(server: PeerServer, tmp_path: Path) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        PeerServer(tmp_path, TOKEN, port=port).start()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=300))
def test_garbage_before_the_greeting(server: PeerServer, garbage: bytes) -> None:
    with raw(server) as sock:
        with suppress(OSError):  # it may have been sent away half way through
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
        assert b"proof" not in ended(sock)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=300))
def test_garbage_after_the_greeting(server: PeerServer, garbage: bytes) -> None:
    _, sock = greeted(server)
    with sock:
        with suppress(OSError):  # it may have been sent away half way through
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
        ended(sock)
    with closing(Peer("b", server.address, TOKEN)) as peer:
        peer.ping()


NONSENSE = (
    b"[1]",
    b'{"op":"explode"}',
    b"{}",
    b'{"op":"list"}',
    b'{"op":"read","area":"a","group":"g","name":"n","start":-1}',
    b'{"op":"read","area":"a","group":"g","name":"n"}',
    b'{"op":"put","area":"a","group":"g","name":"n","nbytes":"many"}',
    b'{"op":"put","area":"a","group":"g","name":"n","nbytes":true}',
    b"[" * 5000,
)


def test_requests_that_make_no_sense(server: PeerServer, peer: Peer) -> None:
    for body in NONSENSE:
        _, sock = greeted(server)
        with sock:
            sock.sendall(struct.pack("!I", len(body)) + body)
            assert sock.recv(4) != b"", body  # it is told so
        peer.ping()


def test_messages_that_are_too_long(server: PeerServer, peer: Peer) -> None:
    with raw(server) as sock:
        sock.sendall(struct.pack("!I", 2000))
        assert b"error" not in ended(sock)  # a stranger is told nothing
    _, sock = greeted(server)
    with sock:
        sock.sendall(struct.pack("!I", MESSAGE_LIMIT + 1))
        assert b"at most 65536" in ended(sock)
    connection, sock = greeted(server)
    with sock:
        connection.send({"op": "put", "area": "a", "group": "g", "name": "n", "nbytes": 0})
        connection.receive()
        connection.send({"record": RECORD_LIMIT + 1})
        assert b"a record of" in ended(sock)
    assert list(peer.names("a")) == []


# -- nobody waits for ever -------------------------------------------------------------------


def test_a_client_that_says_nothing_is_sent_away(server: PeerServer) -> None:
    with raw(server) as sock:
        begin = time.monotonic()
        ended(sock)
        assert time.monotonic() - begin < 4


def test_a_client_that_stops_half_way_is_sent_away(server: PeerServer, peer: Peer) -> None:
    connection, sock = greeted(server)
    with sock:
        connection.send({"op": "put", "area": "a", "group": "g", "name": "n", "nbytes": 100})
        connection.receive()
        connection.send_bytes(b"half")
        begin = time.monotonic()
        ended(sock)
        assert time.monotonic() - begin < 4
    assert list(peer.names("a")) == []


def test_a_stopped_server_costs_its_clients_a_timeout(tmp_path: Path) -> None:
    process = Process(tmp_path / "kept")
    try:
        used = Peer("b", process.address, TOKEN, timeout=0.3)
        send(used, BLOB, b"abc")
        process.stop()
        fresh = Peer("b", process.address, TOKEN, timeout=0.3)
        for peer in (used, fresh):
            begin = time.monotonic()
            with pytest.raises(TierError, match=r"did not answer in 0\.3 s"):
                peer.names("area")
            with pytest.raises(TierError, match=r"did not answer in 0\.3 s"):
                send(peer, BLOB, bytes(50_000_000))
            assert time.monotonic() - begin < 5
            peer.close()
    finally:
        process.close()


def test_a_file_that_became_shorter_is_not_filled_up_with_an_error_message(
    server: PeerServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is cut off between the look at its size and the sending of its bytes."""
    send(peer, BLOB, bytes(1000))
    open_part = BlobFolder.open_part

    def cut_off(folder: BlobFolder, *asked: Any) -> Any:
        found = open_part(folder, *asked)
        os.truncate(folder.path(BLOB, "bin"), 990)
        return found

    monkeypatch.setattr(BlobFolder, "open_part", cut_off)
    with pytest.raises(TierError, match="cannot be reached"):
        fetch(peer, BLOB, 0, 1000)


def test_closing_ends_connections_that_are_in_use(tmp_path: Path) -> None:
    server = PeerServer(tmp_path, TOKEN, timeout=30.0).start()
    _, sock = greeted(server)
    sink = Peer("b", server.address, TOKEN).put(BLOB, 1000)
    begin = time.monotonic()
    server.close()
    assert time.monotonic() - begin < 4
    with sock:
        ended(sock)
    sink.close()
