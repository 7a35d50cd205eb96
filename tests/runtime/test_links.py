"""Cutting a group's connections, and nothing else."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from sapwood.runtime.links import Links


def connect() -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname(), timeout=10)
    far, _ = listener.accept()
    far.settimeout(10)
    return listener, near, far


def test_only_connections_made_meanwhile_are_cut() -> None:
    older = connect()
    links = Links()
    younger = links.during(connect)
    links.cut()
    assert younger[2].recv(1) == b""
    older[1].sendall(b"x")
    assert older[2].recv(1) == b"x"
    with socket.create_connection(younger[0].getsockname(), timeout=10):
        pass  # the listener lives on
    for one in (*older, *younger):
        one.close()


def test_a_number_used_again_by_somebody_else_is_left_alone() -> None:
    links = Links()
    listener, near, far = links.during(connect)
    number = near.fileno()
    near.close()
    reused = socket.socket()  # the lowest free number
    other = connect()
    assert reused.fileno() == number
    os.dup2(other[1].fileno(), number)
    links.cut()
    other[1].sendall(b"x")
    assert other[2].recv(1) == b"x"
    for one in (reused, listener, far, *other):
        one.close()


def test_a_number_used_again_for_a_file_leaves_nothing_open(tmp_path: Path) -> None:
    links = Links()
    listener, near, far = links.during(connect)
    with (tmp_path / "file").open("w") as file:
        os.dup2(file.fileno(), near.fileno())
    before = sorted(Path("/proc/self/fd").iterdir())
    links.cut()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    for one in (listener, far):
        one.close()
    os.close(near.detach())


@pytest.mark.parametrize("which", [1, 2])
def test_connections_already_closed_do_no_harm(which: int) -> None:
    links = Links()
    made = links.during(connect)
    made[which].close()
    links.cut()
    links.cut()
    for one in made:
        with closing(one):
            pass
