"""What every transport must do; run it on each with two groups of real processes.

    def test_moves_bytes():
        transport.check_moves_bytes(open_mine, donors=2, receivers=3)

``open_mine`` is an ``Opener`` that processes can import. Each check raises when the transport does
not keep the contract of ``sapwood.transport.base``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from sapwood.errors import TransportError
from sapwood.runtime.stores import PrefixStore, TCPStore
from sapwood.testing import ranks
from sapwood.testing.outcome import failure
from sapwood.transport.base import Ends, Link, Opener, Transfer

__all__ = [
    "check_late_peer",
    "check_lost_peer",
    "check_moves_bytes",
    "check_no_leftovers",
    "check_stopped_peer",
    "check_threads",
    "check_ways_of_posting",
]

SIZES = (0, 1, 3, 4096, 5 * 2**20 + 1)
_BIG = 48 * 2**20
_PATIENT, _SOON = 30.0, 2.0
Work = Callable[..., Any]


def check_moves_bytes(opener: Opener, donors: int, receivers: int, timeout: float = 60.0) -> None:
    """Every size arrives bit for bit from each donor at each receiver, unaligned ones too."""
    _both(opener, _give_sizes, _take_sizes, donors, receivers, timeout)


def check_ways_of_posting(opener: Opener, timeout: float = 60.0) -> None:
    """Many messages at once, in any order, before and after the other side, and both ways."""
    _both(opener, _give_many, _take_many, 1, 1, timeout)


def check_threads(opener: Opener, timeout: float = 60.0) -> None:
    """Several threads use one link."""
    _both(opener, _give_by_threads, _take_by_threads, 1, 1, timeout)


def check_late_peer(opener: Opener, timeout: float = 60.0) -> None:
    """Who comes alone gets a ``TransportError`` in time, and may come again."""
    with _groups(opener, 1, 0, _come_alone, _nothing) as (donors, _):
        _finish(donors, timeout)


def check_lost_peer(opener: Opener, timeout: float = 60.0) -> None:
    """A peer killed in the middle fails the other side's messages soon, and only those."""
    with _groups(opener, 1, 1, _survive, _stall) as (donors, receivers):
        donors.wait_mark("under way", 0, timeout)
        receivers.wait_mark("under way", 0, timeout)
        receivers.kill(0, signal.SIGKILL)
        _finish(donors, timeout)


def check_stopped_peer(opener: Opener, timeout: float = 60.0) -> None:
    """A stopped peer costs the wait's timeout, no more; ``close`` returns at once."""
    with _groups(opener, 1, 1, _give_up, _stall) as (donors, receivers):
        receivers.wait_mark("under way", 0, timeout)
        receivers.kill(0, signal.SIGSTOP)
        donors.wait_mark("under way", 0, timeout)
        _finish(donors, timeout)


def check_no_leftovers(opener: Opener, timeout: float = 60.0) -> None:
    """A closed link leaves no thread, socket or memory, failed or not; the next one works."""
    _both(opener, _count_leftovers, _count_leftovers, 1, 1, timeout)


def _both(
    opener: Opener, give: Work, take: Work, donors: int, receivers: int, timeout: float
) -> None:
    with _groups(opener, donors, receivers, give, take) as (first, second):
        _finish(first, timeout)
        _finish(second, timeout)


def _finish(group: ranks.Group, timeout: float) -> None:
    error = failure(group.wait(timeout)) or group.left_behind()
    if error is not None:
        raise error


@contextmanager
def _groups(
    opener: Opener, donors: int, receivers: int, give: Work, take: Work
) -> Iterator[tuple[ranks.Group, Any]]:
    """Two separately started groups, which know a store and nothing else of each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shape = (store.port, donors, donors + receivers)
    with ExitStack() as stack:
        first = stack.enter_context(ranks.start(_donate, donors, give, opener, shape))
        second = None
        if receivers:
            second = stack.enter_context(ranks.start(_receive, receivers, take, opener, shape))
        yield first, second
    del store


def _donate(work: Work, opener: Opener, shape: tuple[int, int, int]) -> None:
    work(_Meeting(opener, ranks.rank(), *shape))


def _receive(work: Work, opener: Opener, shape: tuple[int, int, int]) -> None:
    work(_Meeting(opener, shape[1] + ranks.rank(), *shape))


def _nothing(meeting: _Meeting) -> None:
    """There is no second group."""


class _Meeting:
    """One process of either group, which may open links."""

    def __init__(self, opener: Opener, me: int, port: int, donors: int, size: int) -> None:
        self.opener, self.me, self.donors, self.size = opener, me, donors, size
        self.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def open(self, name: str, *, size: int | None = None, timeout: float = _PATIENT) -> Link:
        ends = self.ends(size or self.size, timeout)
        return self.opener(PrefixStore(name, self.store), ends)

    def ends(self, size: int, timeout: float = _PATIENT) -> Ends:
        hosts = ("localhost",) * size
        return Ends(me=self.me, donors=self.donors, hosts=hosts, timeout=timeout)

    @property
    def peers(self) -> range:
        return self.ends(self.size).peers


def _content(seed: int, size: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)


def _unaligned(size: int) -> torch.Tensor:
    return torch.zeros(size + 6, dtype=torch.uint8)[3 : size + 3]


def _settle(transfers: list[Transfer]) -> None:
    for one in transfers:
        one.wait(_PATIENT)


def _seed(donor: int, receiver: int, tag: int) -> int:
    return (donor * 100 + receiver) * 10_000 + tag


def _give_sizes(meeting: _Meeting) -> None:
    with closing(meeting.open("sizes")) as link:
        under_way = []
        for peer in meeting.peers:
            for tag, size in enumerate(SIZES):
                data = _unaligned(size).copy_(_content(_seed(meeting.me, peer, tag), size))
                under_way.append(link.send(peer, tag, data))
        _settle(under_way)


def _take_sizes(meeting: _Meeting) -> None:
    with closing(meeting.open("sizes")) as link:
        under_way, found = [], []
        for peer in reversed(meeting.peers):
            for tag in reversed(range(len(SIZES))):
                whole = torch.full((SIZES[tag] + 2,), 7, dtype=torch.uint8)
                under_way.append(link.recv(peer, tag, whole[1:-1]))
                found.append((peer, tag, whole))
        _settle(under_way)
        for peer, tag, whole in found:
            expected = _content(_seed(peer, meeting.me, tag), SIZES[tag])
            assert torch.equal(whole[1:-1], expected), f"message {tag} of {peer} is not what it was"
            assert whole[0] == whole[-1] == 7, "bytes beside the message were written"


_MANY = 300


def _give_many(meeting: _Meeting) -> None:
    with closing(meeting.open("many")) as link:
        peer = meeting.peers[0]
        back = torch.zeros(1000, dtype=torch.uint8)
        answer = link.recv(peer, 5, back)  # the same tag is used the other way
        _settle([link.send(peer, tag, _content(tag, 1000 + tag)) for tag in range(_MANY)])
        # Two big ones, of which the receiver awaits the second first.
        _settle([link.send(peer, _MANY + one, _content(one, _BIG // 4)) for one in range(2)])
        answer.wait(_PATIENT)
        assert torch.equal(back, _content(99, 1000))


def _take_many(meeting: _Meeting) -> None:
    with closing(meeting.open("many")) as link:
        peer = meeting.peers[0]
        memory = [torch.zeros(1000 + tag, dtype=torch.uint8) for tag in range(_MANY)]
        early = [link.recv(peer, tag, memory[tag]) for tag in range(1, _MANY, 2)]
        time.sleep(0.2)  # the rest is sent before it is expected
        late = [link.recv(peer, tag, memory[tag]) for tag in reversed(range(0, _MANY, 2))]
        _settle(late + early)
        assert all(torch.equal(memory[tag], _content(tag, 1000 + tag)) for tag in range(_MANY))
        for one in (1, 0):
            big = torch.zeros(_BIG // 4, dtype=torch.uint8)
            link.recv(peer, _MANY + one, big).wait(_PATIENT)
            assert torch.equal(big, _content(one, _BIG // 4))
        link.send(peer, 5, _content(99, 1000)).wait(_PATIENT)


_THREADS, _EACH = 4, 40


def _by_threads(work: Callable[[int], None]) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in range(_THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failed:
        raise failed[0]


def _give_by_threads(meeting: _Meeting) -> None:
    with closing(meeting.open("threads")) as link:
        peer = meeting.peers[0]

        def give(number: int) -> None:
            for one in range(_EACH):
                tag = number * _EACH + one
                link.send(peer, tag, _content(tag, 50_000 + tag)).wait(_PATIENT)

        _by_threads(give)


def _take_by_threads(meeting: _Meeting) -> None:
    with closing(meeting.open("threads")) as link:
        peer = meeting.peers[0]

        def take(number: int) -> None:
            for one in range(_EACH):
                tag = number * _EACH + one
                data = torch.zeros(50_000 + tag, dtype=torch.uint8)
                link.recv(peer, tag, data).wait(_PATIENT)
                assert torch.equal(data, _content(tag, 50_000 + tag))

        _by_threads(take)


def _come_alone(meeting: _Meeting) -> None:
    for attempt in range(2):
        begun = time.monotonic()
        try:
            meeting.open(f"alone/{attempt}", size=2, timeout=1.0).close()
        except TransportError:
            assert time.monotonic() - begun < 1.0 + _PATIENT / 3, "the error came late"
        else:
            raise AssertionError("a link was opened though nobody else came")


def _stall(meeting: _Meeting) -> None:
    """Take message after message, until something is done to this process."""
    link = meeting.open("stall")
    data = torch.zeros(_BIG, dtype=torch.uint8)
    for tag in range(10, 10_000):
        link.recv(meeting.peers[0], tag, data).wait(_PATIENT)
        if tag == 12:
            ranks.mark("under way")


def _send_until_it_fails(meeting: _Meeting, link: Link, patience: float) -> None:
    data = torch.zeros(_BIG, dtype=torch.uint8)
    for tag in range(10, 10_000):
        begun = time.monotonic()
        try:
            link.send(meeting.peers[0], tag, data).wait(patience)
        except TransportError:
            took = time.monotonic() - begun
            assert took < min(patience + _PATIENT / 3, _PATIENT / 2), f"it took {took:.1f} s"
            return
        if tag == 12:
            ranks.mark("under way")
    raise AssertionError("messages succeeded though nobody took them")


def _fails(act: Callable[[], object], within: float) -> None:
    begun = time.monotonic()
    try:
        act()
    except TransportError:
        took = time.monotonic() - begun
        assert took < within, f"the error came after {took:.1f} s"
    else:
        raise AssertionError("a message succeeded though nobody took it")


def _survive(meeting: _Meeting) -> None:
    link = meeting.open("stall")
    peer = meeting.peers[0]
    never = link.recv(peer, 2, torch.zeros(_BIG, dtype=torch.uint8))
    _send_until_it_fails(meeting, link, _PATIENT)
    _fails(lambda: never.wait(_PATIENT), _PATIENT / 2)
    _fails(lambda: link.send(peer, 3, _content(1, 1000)).wait(_PATIENT), _PATIENT / 2)
    _close_quickly(link)
    # Another try is alone by now, and must end as such a one does.
    _fails(lambda: meeting.open("again", timeout=0.5), _PATIENT / 3)


def _give_up(meeting: _Meeting) -> None:
    link = meeting.open("stall")
    never = link.recv(meeting.peers[0], 2, torch.zeros(_BIG, dtype=torch.uint8))
    _send_until_it_fails(meeting, link, _SOON)
    _fails(lambda: never.wait(_SOON), _SOON + _PATIENT / 3)
    _close_quickly(link)


def _close_quickly(link: Link) -> None:
    begun = time.monotonic()
    link.close()
    link.close()
    took = time.monotonic() - begun
    assert took < 2.0, f"close took {took:.1f} s"


def _count_leftovers(meeting: _Meeting) -> None:
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


def _one_link(meeting: _Meeting, name: str) -> None:
    with closing(meeting.open(name)) as link:
        peer = meeting.peers[0]
        data = torch.zeros(100_000, dtype=torch.uint8)
        (link.send if meeting.me == 0 else link.recv)(peer, 1, data).wait(_PATIENT)


def _broken_link(meeting: _Meeting) -> None:
    link = meeting.open("broken")
    under_way = link.recv(meeting.peers[0], 1, torch.zeros(_BIG, dtype=torch.uint8))
    _fails(lambda: under_way.wait(0.2), _PATIENT / 3)
    link.close()


def _more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return any(one > other for one, other in zip(now, before, strict=True))


def _owned() -> tuple[int, int, int]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return threads, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))  # noqa: PTH208, S108
