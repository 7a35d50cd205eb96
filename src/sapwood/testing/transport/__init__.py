"""What every transport must do; run it on each with two groups of real processes.

    def test_moves_bytes():
        transport.check_moves_bytes(open_mine, donors=2, receivers=3)

``open_mine`` is an ``Opener`` that processes can import. Each check raises when the transport does
not keep the contract of ``sapwood.transport.base``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sapwood.runtime.stores import TCPStore
from sapwood.testing import ranks
from sapwood.testing.outcome import failure
from sapwood.testing.transport.failing import (
    come_alone,
    count_leftovers,
    give_up,
    pour,
    run_dry,
    stall,
    survive,
)
from sapwood.testing.transport.meeting import Meeting
from sapwood.testing.transport.moving import (
    give_by_threads,
    give_many,
    give_rows,
    give_sizes,
    take_by_threads,
    take_many,
    take_rows,
    take_sizes,
)
from sapwood.transport.base import Opener

__all__ = [
    "check_gathers",
    "check_late_peer",
    "check_lost_donor",
    "check_lost_peer",
    "check_moves_bytes",
    "check_no_leftovers",
    "check_stopped_peer",
    "check_threads",
    "check_ways_of_posting",
]

Work = Callable[..., Any]
_DONOR, _RECEIVER = 0, 1


def check_moves_bytes(opener: Opener, donors: int, receivers: int, timeout: float = 60.0) -> None:
    """Every size arrives bit for bit from each donor at each receiver, unaligned ones too."""
    _both(opener, give_sizes, take_sizes, donors, receivers, timeout)


def check_ways_of_posting(opener: Opener, timeout: float = 60.0) -> None:
    """Many messages at once, in any order, before and after the other side, and both ways."""
    _both(opener, give_many, take_many, 1, 1, timeout)


def check_gathers(opener: Opener, timeout: float = 60.0) -> None:
    """Several tensors are one message, cut differently on either side; for links that gather."""
    _both(opener, give_rows, take_rows, 1, 1, timeout)


def check_threads(opener: Opener, timeout: float = 60.0) -> None:
    """Several threads use one link."""
    _both(opener, give_by_threads, take_by_threads, 1, 1, timeout)


def check_late_peer(opener: Opener, timeout: float = 60.0) -> None:
    """Who comes alone gets a ``TransportError`` in time, and may come again."""
    with _groups(opener, 1, 0, come_alone, _nothing) as (donors, _):
        _finish(donors, timeout)


def check_lost_peer(opener: Opener, timeout: float = 60.0) -> None:
    """A peer killed in the middle fails the other side's messages soon, and only those."""
    _hurt(opener, survive, stall, _RECEIVER, signal.SIGKILL, timeout)


def check_lost_donor(opener: Opener, timeout: float = 60.0) -> None:
    """A donor killed in the middle fails the messages that are awaited, soon."""
    _hurt(opener, pour, run_dry, _DONOR, signal.SIGKILL, timeout)


def check_stopped_peer(opener: Opener, timeout: float = 60.0) -> None:
    """A stopped peer costs the wait's timeout, no more; ``close`` returns at once."""
    _hurt(opener, give_up, stall, _RECEIVER, signal.SIGSTOP, timeout)


def check_no_leftovers(opener: Opener, timeout: float = 60.0) -> None:
    """A closed link leaves no thread, socket or memory, failed or not; the next one works."""
    _both(opener, count_leftovers, count_leftovers, 1, 1, timeout)


def _both(
    opener: Opener, give: Work, take: Work, donors: int, receivers: int, timeout: float
) -> None:
    with _groups(opener, donors, receivers, give, take) as (first, second):
        _finish(first, timeout)
        _finish(second, timeout)


def _hurt(
    opener: Opener, give: Work, take: Work, victim: int, how: signal.Signals, timeout: float
) -> None:
    """Kill or stop one of the two while messages are under way; the other must end well."""
    with _groups(opener, 1, 1, give, take) as sides:
        for side in sides:
            side.wait_mark("under way", 0, timeout)
        sides[victim].kill(0, how)
        _finish(sides[1 - victim], timeout)


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
    work(Meeting(opener, ranks.rank(), *shape))


def _receive(work: Work, opener: Opener, shape: tuple[int, int, int]) -> None:
    work(Meeting(opener, shape[1] + ranks.rank(), *shape))


def _nothing(meeting: Meeting) -> None:
    """There is no second group."""
