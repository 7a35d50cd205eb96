"""What may stand where a regular file is expected, and a test that must not wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

__all__ = ["ODD", "SAID", "Odd", "device", "fifo", "no_waiting"]

SECONDS = 20
Odd = Callable[[Path], None]


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


ODD = pytest.mark.parametrize("odd", [fifo, device])
SAID = r"is a (FIFO|character device)"


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whoever waits for a FIFO fails, and not the whole test run."""

    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"something was waited for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
