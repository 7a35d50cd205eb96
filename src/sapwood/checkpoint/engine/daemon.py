"""The engine's process: detached from whoever started it, and of low priority."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.checkpoint.engine.address import Address
from sapwood.checkpoint.engine.server import Server
from sapwood.runtime import faults

__all__ = ["main"]

log = logging.getLogger(__name__)
_NICE = 10
_BACKLOG = 128
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
_IOPRIO_WHO_PROCESS, _IOPRIO_BEST_EFFORT_LAST = 1, (2 << 13) | 7


def main(fd: int) -> int:
    """Take the engine's name, then serve in a process that is nobody's child.

    Ends with 0 as soon as an engine has the name, this one or another: whoever started it waits for
    that, and connects.
    """
    with os.fdopen(fd) as file:
        order: dict[str, Any] = json.load(file)
    address = Address(name=order["name"], token_file=Path(order["token_file"]))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address.socket)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return 0  # another rank was faster
        raise
    try:
        address.write_token(order["token"])
    except OSError as error:
        log.warning("a later group will not find this engine, it has no token: %s", error)
    if os.fork():
        os._exit(0)
    _settle()
    server = Server(listener, address, order["token"], float(order["linger"]))
    signal.signal(signal.SIGTERM, server.end)
    listener.listen(_BACKLOG)  # by this process: it is whom the kernel tells ranks about
    try:
        faults.point("engine.start")
        server.serve()
    except Exception:
        log.exception("the engine ends, unforeseen")
        return 1
    return 0


def _settle() -> None:
    """Be out of everybody's way."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(message)s",
    )
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Meant for the ranks, which save before they stop, but batch systems signal every process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # It may be refused; the engine is then only less polite.
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_BEST_EFFORT_LAST)
