"""The connections behind a process group, so that a broken group can be left at once.

gloo cannot abort: a collective whose peer is stuck blocks until its timeout, and so does destroying
the group or ending the process. Shutting the connections down makes it fail now, on both sides.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["Links"]

T = TypeVar("T")


class Links:
    """The TCP connections that came up while something was being made."""

    def __init__(self) -> None:
        """Start with none."""
        self._inodes: dict[int, str] = {}

    def during(self, make: Callable[[], T]) -> T:
        """Call ``make`` and remember the connections this process gained meanwhile."""
        before = _sockets()
        made = make()
        self._inodes = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}
        return made

    def cut(self) -> None:
        """Shut them down. Descriptors stay open: they are their owner's to close."""
        present = _sockets()
        for fd, name in self._inodes.items():
            if present.get(fd) != name:
                continue
            with closing(socket.socket(fileno=os.dup(fd))) as link:
                if _is_connection(link):
                    with suppress(OSError):  # the peer was faster
                        link.shutdown(socket.SHUT_RDWR)
        self._inodes = {}


def _is_connection(link: socket.socket) -> bool:
    """A TCP connection that is up; never a listener, whose owner does not expect it to end."""
    if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
        return False
    if link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    try:
        link.getpeername()
    except OSError:
        return False
    return True


def _sockets() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if target.startswith("socket:"):
            found[int(entry.name)] = target
    return found
