"""Who is at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct

__all__ = ["peer_process"]

_CREDENTIALS = struct.Struct("3i")


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """The process that connected or listened there, 0 if it is out of sight, and its user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
