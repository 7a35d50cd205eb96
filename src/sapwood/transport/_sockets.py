"""The TCP sockets of this process, by address, so that those of one group can be cut.

A link is opened in a thread while the rest of the process goes on, and makes connections of its
own: which ones are the link's is told by where its members listen, not by when they appeared.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from sapwood.runtime.links import twin

__all__ = ["Address", "cut", "listeners"]

Address = tuple[str, int]


def listeners() -> list[Address]:
    """Where this process listens for TCP connections."""
    return [_address(one.getsockname()) for one in _tcp() if _listens(one)]


def cut(addresses: frozenset[Address]) -> None:
    """Shut down each connection that has one of ``addresses`` at either end.

    Descriptors stay open: they are their owner's to close.
    """
    for one in _tcp():
        with suppress(OSError):
            if _listens(one):
                continue
            ends = {_address(one.getsockname()), _address(one.getpeername())}
            if ends & addresses:
                one.shutdown(socket.SHUT_RDWR)


def _tcp() -> Iterator[socket.socket]:
    """A copy of each TCP socket of this process, closed when the next is asked for."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with closing(twin(int(entry.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and (
                    one.type == socket.SOCK_STREAM
                ):
                    yield one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]
