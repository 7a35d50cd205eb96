"""Children that die at a chosen file operation."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from sapwood.runtime import faults


def inside(folder: Path) -> Callable[..., bool]:
    """Operations on a folder and what is in it, not those on the folders above it."""
    return lambda path, **_: path == folder or folder in path.parents


def dies(work: Callable[[Callable[[], None]], object], at: int, folder: Path) -> tuple[bool, int]:
    """Run ``work`` in a child that is killed at its ``at``-th file operation in ``folder``.

    Whether it was killed, and how often it called the function it is given before that.
    """
    read, write = os.pipe()
    # A fork and no new interpreter: hundreds of children cost seconds, not minutes. The child does
    # file operations only and never returns.
    pid = os.fork()
    if pid == 0:
        _child(lambda: work(lambda: os.write(write, b".") and None), at, folder)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        count = len(told.read())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child failed with {status}"
    return status != 0, count


def _child(work: Callable[[], object], at: int, folder: Path) -> None:
    try:
        faults.arm("files", "kill", at=at, when=inside(folder))
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)
