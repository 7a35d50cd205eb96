"""Receiving descriptors along with a message."""

from __future__ import annotations

import socket
from array import array

__all__ = ["receive_with_fds"]

_FD = "i"


def receive_with_fds(
    sock: socket.socket, nbytes: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], bool]:
    """Some bytes, the descriptors that came with them, and whether there were more than ``most``.

    The descriptors are the caller's to close; those beyond ``most`` the kernel has dropped. Not
    ``socket.recv_fds``, which ignores its flags: a program that another thread starts meanwhile
    would inherit them, and keep shared memory or a file open for as long as it lives.
    """
    fds = array(_FD)
    space = socket.CMSG_LEN(most * fds.itemsize)
    data, extra, told, _ = sock.recvmsg(nbytes, space, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return data, list(fds), bool(told & socket.MSG_CTRUNC)
