"""The name under which others reach this machine."""

from __future__ import annotations

import os
import socket
from contextlib import closing

__all__ = ["HOST", "own_host"]

HOST = "SAPWOOD_HOST"
"""Says it, where it cannot be found out."""


def own_host() -> str:
    """What ``SAPWOOD_HOST`` says, else the address that talks to where the ranks meet."""
    given = os.environ.get(HOST)
    if given:
        return given
    meeting = os.environ.get("MASTER_ADDR", "")
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((meeting or "127.0.0.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host
