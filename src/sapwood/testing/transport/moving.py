"""Both sides of transfers that must succeed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import torch

from sapwood.testing.transport.meeting import (
    BIG,
    PATIENT,
    Meeting,
    content,
    seed,
    settle,
    unaligned,
)

__all__ = [
    "give_by_threads",
    "give_many",
    "give_rows",
    "give_sizes",
    "take_by_threads",
    "take_many",
    "take_rows",
    "take_sizes",
]

SIZES = (0, 1, 3, 4096, 5 * 2**20 + 1)


def give_sizes(meeting: Meeting) -> None:
    with closing(meeting.open("sizes")) as link:
        under_way = []
        for peer in meeting.peers:
            for tag, size in enumerate(SIZES):
                data = unaligned(size).copy_(content(seed(meeting.me, peer, tag), size))
                under_way.append(link.send(peer, tag, data))
        settle(under_way)


def take_sizes(meeting: Meeting) -> None:
    with closing(meeting.open("sizes")) as link:
        under_way, found = [], []
        for peer in reversed(meeting.peers):
            for tag in reversed(range(len(SIZES))):
                whole = torch.full((SIZES[tag] + 2,), 7, dtype=torch.uint8)
                under_way.append(link.recv(peer, tag, whole[1:-1]))
                found.append((peer, tag, whole))
        settle(under_way)
        for peer, tag, whole in found:
            expected = content(seed(peer, meeting.me, tag), SIZES[tag])
            assert torch.equal(whole[1:-1], expected), f"message {tag} of {peer} is not what it was"
            assert whole[0] == whole[-1] == 7, "bytes beside the message were written"


_MANY = 300


CUTS = ((0, 5, 5, 70_000, 2_000_000), (1, 4096, 1_500_000, 2_000_000), (2_000_000,))
"""Where the same message is cut into pieces, on one side and the other."""


def give_rows(meeting: Meeting) -> None:
    with closing(meeting.open("rows")) as link:
        peer = meeting.peers[0]
        under_way = []
        for tag, cuts in enumerate(CUTS):
            whole = content(tag, CUTS[0][-1])
            under_way.append(link.send(peer, tag, _pieces(whole, cuts)))
        settle(under_way)


def take_rows(meeting: Meeting) -> None:
    with closing(meeting.open("rows")) as link:
        peer = meeting.peers[0]
        found = [torch.zeros(CUTS[0][-1], dtype=torch.uint8) for _ in CUTS]
        cuts = (CUTS[1], CUTS[0], CUTS[0])
        settle([link.recv(peer, tag, _pieces(found[tag], cuts[tag])) for tag in range(len(CUTS))])
        for tag, whole in enumerate(found):
            assert torch.equal(whole, content(tag, len(whole))), f"message {tag} is not what it was"


def _pieces(whole: torch.Tensor, cuts: tuple[int, ...]) -> list[torch.Tensor]:
    return [whole[start:stop] for start, stop in zip((0, *cuts), cuts, strict=False)]


def give_many(meeting: Meeting) -> None:
    with closing(meeting.open("many")) as link:
        peer = meeting.peers[0]
        back = torch.zeros(1000, dtype=torch.uint8)
        answer = link.recv(peer, 5, back)  # the same tag is used the other way
        settle([link.send(peer, tag, content(tag, 1000 + tag)) for tag in range(_MANY)])
        # Two big ones, of which the receiver awaits the second first.
        settle([link.send(peer, _MANY + one, content(one, BIG // 4)) for one in range(2)])
        answer.wait(PATIENT)
        assert torch.equal(back, content(99, 1000))


def take_many(meeting: Meeting) -> None:
    with closing(meeting.open("many")) as link:
        peer = meeting.peers[0]
        memory = [torch.zeros(1000 + tag, dtype=torch.uint8) for tag in range(_MANY)]
        early = [link.recv(peer, tag, memory[tag]) for tag in range(1, _MANY, 2)]
        time.sleep(0.2)  # the rest is sent before it is expected
        late = [link.recv(peer, tag, memory[tag]) for tag in reversed(range(0, _MANY, 2))]
        settle(late + early)
        assert all(torch.equal(memory[tag], content(tag, 1000 + tag)) for tag in range(_MANY))
        for one in (1, 0):
            big = torch.zeros(BIG // 4, dtype=torch.uint8)
            link.recv(peer, _MANY + one, big).wait(PATIENT)
            assert torch.equal(big, content(one, BIG // 4))
        link.send(peer, 5, content(99, 1000)).wait(PATIENT)


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


def give_by_threads(meeting: Meeting) -> None:
    with closing(meeting.open("threads")) as link:
        peer = meeting.peers[0]

        def give(number: int) -> None:
            for one in range(_EACH):
                tag = number * _EACH + one
                link.send(peer, tag, content(tag, 50_000 + tag)).wait(PATIENT)

        _by_threads(give)


def take_by_threads(meeting: Meeting) -> None:
    with closing(meeting.open("threads")) as link:
        peer = meeting.peers[0]

        def take(number: int) -> None:
            for one in range(_EACH):
                tag = number * _EACH + one
                data = torch.zeros(50_000 + tag, dtype=torch.uint8)
                link.recv(peer, tag, data).wait(PATIENT)
                assert torch.equal(data, content(tag, 50_000 + tag))

        _by_threads(take)
