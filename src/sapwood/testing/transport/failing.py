"""Both sides of transfers that must fail, in time and without a trace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from sapwood.errors import TransportError
from sapwood.testing import ranks
from sapwood.testing.transport.meeting import BIG, PATIENT, SOON, Meeting, content, fails
from sapwood.transport.base import Link, Transfer

__all__ = ["come_alone", "count_leftovers", "give_up", "pour", "run_dry", "stall", "survive"]

_NAMED = ("sapwood", "torch_", "gloo", "psm_")
"""How names of shared memory begin that a link, torch, gloo or multiprocessing may give."""


def come_alone(meeting: Meeting) -> None:
    for attempt in range(2):
        begun = time.monotonic()
        try:
            meeting.open(f"alone/{attempt}", size=2, timeout=1.0).close()
        except TransportError:
            assert time.monotonic() - begun < 1.0 + PATIENT / 3, "the error came late"
        else:
            raise AssertionError("a link was opened though nobody else came")


def stall(meeting: Meeting) -> None:
    """Take message after message, until something is done to this process."""
    _go_on(meeting, meeting.open("stall").recv)


def pour(meeting: Meeting) -> None:
    """Send message after message, until something is done to this process."""
    _go_on(meeting, meeting.open("pour").send)


def _go_on(meeting: Meeting, act: Callable[..., Transfer]) -> None:
    data = torch.zeros(BIG, dtype=torch.uint8)
    for tag in range(10, 10_000):
        act(meeting.peers[0], tag, data).wait(PATIENT)
        if tag == 12:
            ranks.mark("under way")


def _send_until_it_fails(meeting: Meeting, link: Link, patience: float) -> None:
    data = torch.zeros(BIG, dtype=torch.uint8)
    for tag in range(10, 10_000):
        begun = time.monotonic()
        try:
            link.send(meeting.peers[0], tag, data).wait(patience)
        except TransportError:
            took = time.monotonic() - begun
            assert took < min(patience + PATIENT / 3, PATIENT / 2), f"it took {took:.1f} s"
            return
        if tag == 12:
            ranks.mark("under way")
    raise AssertionError("messages succeeded though nobody took them")


def survive(meeting: Meeting) -> None:
    link = meeting.open("stall")
    peer = meeting.peers[0]
    never = link.recv(peer, 2, torch.zeros(BIG, dtype=torch.uint8))
    _send_until_it_fails(meeting, link, PATIENT)
    fails(lambda: never.wait(PATIENT), PATIENT / 2)
    fails(lambda: link.send(peer, 3, content(1, 1000)).wait(PATIENT), PATIENT / 2)
    _close_quickly(link)
    # Another try is alone by now, and must end as such a one does.
    fails(lambda: meeting.open("again", timeout=0.5), PATIENT / 3)


def run_dry(meeting: Meeting) -> None:
    """Take messages until the donor is gone, which is told soon."""
    link = meeting.open("pour")
    data = torch.zeros(BIG, dtype=torch.uint8)
    begun = time.monotonic()
    try:
        for tag in range(10, 10_000):
            begun = time.monotonic()
            link.recv(meeting.peers[0], tag, data).wait(PATIENT)
            if tag == 12:
                ranks.mark("under way")
    except TransportError:
        took = time.monotonic() - begun
        assert took < PATIENT / 2, f"the error came after {took:.1f} s"
    else:
        raise AssertionError("messages arrived though nobody sent them")
    _close_quickly(link)


def give_up(meeting: Meeting) -> None:
    link = meeting.open("stall")
    never = link.recv(meeting.peers[0], 2, torch.zeros(BIG, dtype=torch.uint8))
    _send_until_it_fails(meeting, link, SOON)
    fails(lambda: never.wait(SOON), SOON + PATIENT / 3)
    _close_quickly(link)


def _close_quickly(link: Link) -> None:
    begun = time.monotonic()
    link.close()
    link.close()
    took = time.monotonic() - begun
    assert took < 2.0, f"close took {took:.1f} s"


def count_leftovers(meeting: Meeting) -> None:
    _one_link(meeting, "warm")
    time.sleep(0.2)  # the kernel takes a moment to end a thread
    before = _owned()
    for number in range(3):
        _one_link(meeting, f"round/{number}")
    _broken_link(meeting)
    _one_link(meeting, "after a failure")
    deadline = time.monotonic() + 5.0
    while _more(left := _owned(), before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _more(left, before), (
        f"before and after (threads, descriptors, memory): {before}, {left}"
    )


def _one_link(meeting: Meeting, name: str) -> None:
    with closing(meeting.open(name)) as link:
        peer = meeting.peers[0]
        data = torch.zeros(100_000, dtype=torch.uint8)
        (link.send if meeting.me == 0 else link.recv)(peer, 1, data).wait(PATIENT)


def _broken_link(meeting: Meeting) -> None:
    link = meeting.open("broken")
    target = torch.zeros(BIG, dtype=torch.uint8)
    # Also where the other side has closed its end before this one asks.
    fails(lambda: link.recv(meeting.peers[0], 1, target).wait(0.2), PATIENT / 3)
    link.close()


def _more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return any(one > other for one, other in zip(now, before, strict=True))


def _owned() -> tuple[int, int, int]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    # Others use shared memory at the same time, each under names of its own.
    named = [n for n in os.listdir("/dev/shm") if n.startswith(_NAMED)]  # noqa: PTH208, S108
    return threads, len(os.listdir("/proc/self/fd")), len(named)  # noqa: PTH208
