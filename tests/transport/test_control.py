"""The connections beside a transport's own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter

import pytest

from sapwood.transport import _control
from sapwood.transport._control import Control

THREADS = 8


@pytest.mark.parametrize("started", [True, False])
def test_threads_that_close_it_at_once_close_each_descriptor_once(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    here, there = socket.socketpair()
    closed: Counter[int] = Counter()
    close = os.close

    def slow_close(fd: int) -> None:
        closed[fd] += 1
        time.sleep(0.02)  # so that whoever looks before it acts, acts again
        if closed[fd] == 1:
            close(fd)

    control = Control({1: here}, ["", ""])
    control.on_gone = lambda peer: None
    control.on_packet = lambda peer, packet: None
    if started:
        control.start()
    monkeypatch.setattr(_control.os, "close", slow_close)
    threads = [threading.Thread(target=control.close) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    control.tell(1, (0, 0, 0, 0))  # nobody is harmed by what comes too late
    there.close()
    assert here.fileno() == -1
    assert {closed[fd] for fd in (control._wake, control._wake_there)} == {1}
