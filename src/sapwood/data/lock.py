"""One process of a host at a time: a lock on a file, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["alone"]

_PAUSE = 0.02


@contextmanager
def alone(path: str | os.PathLike[str], timeout: float) -> Iterator[bool]:
    """Wait until no other process is in here with this file; gives whether there was one.

    It is only to save work: where a file cannot be locked, or after ``timeout`` seconds, one goes
    on without. LMDB locks another file and in another way, so that writers notice nothing.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        yield _waited(fd, timeout)
    finally:
        os.close(fd)


def _waited(fd: int, timeout: float) -> bool:
    deadline, waited = time.monotonic() + timeout, False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return True
        except OSError:  # some file systems cannot
            return waited
        else:
            return waited
        waited = True
        time.sleep(_PAUSE)
