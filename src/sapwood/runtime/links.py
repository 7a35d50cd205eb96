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

__all__ = ["Links", "twin"]

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
        self._inodes |= {fd: name for fd, name in _sockets().items() if before.get(fd) != name}
        return made

    def cut(self) -> None:
        """Shut them down. Descriptors stay open: they are their owner's to close."""
        for fd, name in self._inodes.items():
            # Their owner's threads close them meanwhile, and the numbers may be used again.
            with suppress(OSError), closing(twin(fd)) as link:
                same = _target(Path(f"/proc/self/fd/{link.fileno()}")) == name
                if same and _is_connection(link):
                    link.shutdown(socket.SHUT_RDWR)
        self._inodes = {}


def twin(fd: int) -> socket.socket:
    """A socket of its own on what a descriptor refers to.

    Raises:
        OSError: that is no socket; nothing is left open.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # meanwhile another thread has closed it, and opened something else
        os.close(copy)
        raise


def _is_connection(link: socket.socket) -> bool:
    """A TCP connection that is up; never a listener, whose owner does not expect it to end."""
    if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
        return False
    if link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    link.getpeername()  # raises when it is down already
    return True


def _sockets() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").glob("*"):
        target = _target(entry)
        if target.startswith("socket:"):
            found[int(entry.name)] = target
    return found


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed by now
        return ""
