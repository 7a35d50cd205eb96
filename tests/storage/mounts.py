"""Small file systems of a child's own: full disks and read-only folders for real.

Root ignores permission bits, and nobody should fill a real disk; so a child takes a mount namespace
of its own and mounts a small tmpfs there. It ends with the child.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_READ_ONLY, _REMOUNT, _ALL_PRIVATE = 0x1, 0x20, 0x4000 | 0x40000  # MS_REC | MS_PRIVATE


class Mount:
    """A tmpfs, inside a child of ``in_child``."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        _call("mount", b"none", b"/", None, _ALL_PRIVATE, None)
        _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=%d" % nbytes)

    def change(self, *, nbytes: int, read_only: bool = False) -> None:
        flags = _REMOUNT | (_READ_ONLY if read_only else 0)
        _call("mount", b"tmpfs", bytes(self.folder), b"tmpfs", flags, b"size=%d" % nbytes)


def in_child(folder: Path, nbytes: int, work: Callable[[Mount], object]) -> None:
    """Run ``work`` in a child with a tmpfs at ``folder``; its failure is the caller's."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(folder, nbytes, work, write)
    os.close(write)
    with os.fdopen(read, "r") as told:
        text = told.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"in the child:\n{text}"
    assert list(folder.iterdir()) == [], "the child wrote here, not to a file system of its own"


def _child(folder: Path, nbytes: int, work: Callable[[Mount], object], write: int) -> None:
    code = 1
    try:
        _call("unshare", _NEW_MOUNTS | (0 if os.geteuid() == 0 else _NEW_USERS))
        work(Mount(folder, nbytes))
        code = 0
    except BaseException:
        os.write(write, traceback.format_exc().encode()[-4000:])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
