"""An engine without descriptors or threads says so, and goes on with what it has."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sapwood.checkpoint.engine.server import Server
from sapwood.checkpoint.engine.wire import Wire
from tests.checkpoint import engines


class Listening:
    """What an engine accepts from: a connection, or why there is none."""

    def __init__(self, *found: socket.socket | OSError) -> None:
        self.found = list(found)

    def accept(self) -> tuple[socket.socket, Any]:
        one = self.found.pop(0)
        if isinstance(one, OSError):
            raise one
        return one, ""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20.0)
    with closing(ours), closing(theirs):
        yield ours, theirs


def server(place: Path, *found: socket.socket | OSError) -> Server:
    given: Any = Listening(*found)
    return Server(given, engines.address(place), "token", linger=0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_no_more_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = [OSError(errno.EMFILE, "Too many open files") for _ in range(5)]
    one = server(tmp_path, *many)
    for _ in range(5):
        one._accept()
    assert warnings(caplog) == ["a connection is refused: [Errno 24] Too many open files"]


def test_no_more_threads(
    tmp_path: Path,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What an engine carries would be lost with it."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        server(tmp_path, pair[0])._accept()
    assert pair[1].recv(100) == b""
    assert warnings(caplog) == ["a connection is refused: can't start new thread"]


def test_another_user_costs_no_thread_and_is_told_nothing(
    tmp_path: Path, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire, "peer", (1, os.getuid() + 1))
    before = threading.active_count()
    server(tmp_path, pair[0])._accept()
    assert threading.active_count() == before
    assert pair[1].recv(100) == b""
