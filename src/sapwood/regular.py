"""Opening files that others may have put there: regular ones only, and without ever waiting.

Opening a FIFO waits until somebody writes to it, and reading a device may have no end. A folder of
checkpoints can hold either, by a mistake or by intent.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["check_regular", "open_regular", "read_regular"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a regular file, or of a symbolic link to one; ``mode`` is for a new one.

    Raises:
        OSError: as the system gives it; EINVAL, saying what is there, for anything but a file.
    """
    # O_NONBLOCK means nothing to a regular file. To a FIFO it means not to wait.
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            _check_mode(path.stat().st_mode, path)
        raise
    try:
        check_regular(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(fd: int, path: Path) -> None:
    """See that a descriptor is of a regular file; ``path`` names it in errors.

    Raises:
        OSError: EINVAL; its ``strerror`` says what it is.
    """
    _check_mode(os.fstat(fd).st_mode, path)


def _check_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(
            errno.EINVAL, f"{path.name} is {kind}, expected a regular file; remove it", str(path)
        )


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as ``open_regular``.
    """
    fd = open_regular(path)
    with os.fdopen(fd, "rb", buffering=0) as file:
        return file.readall()
