"""What the checks of a transport share: a process that opens links, and messages to send."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sapwood.errors import TransportError
from sapwood.runtime.stores import PrefixStore, TCPStore
from sapwood.transport.base import Ends, Link, Opener, Transfer

__all__ = ["BIG", "PATIENT", "SOON", "Meeting", "content", "fails", "seed", "settle", "unaligned"]

BIG = 48 * 2**20
PATIENT, SOON = 30.0, 2.0


class Meeting:
    """One process of either group, which may open links."""

    def __init__(self, opener: Opener, me: int, port: int, donors: int, size: int) -> None:
        self.opener, self.me, self.donors, self.size = opener, me, donors, size
        self.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def open(self, name: str, *, size: int | None = None, timeout: float = PATIENT) -> Link:
        ends = self.ends(size or self.size, timeout)
        return self.opener(PrefixStore(name, self.store), ends)

    def ends(self, size: int, timeout: float = PATIENT) -> Ends:
        hosts = ("localhost",) * size
        return Ends(me=self.me, donors=self.donors, hosts=hosts, timeout=timeout)

    @property
    def peers(self) -> range:
        return self.ends(self.size).peers


def content(seed: int, size: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)


def unaligned(size: int) -> torch.Tensor:
    return torch.zeros(size + 6, dtype=torch.uint8)[3 : size + 3]


def settle(transfers: list[Transfer]) -> None:
    for one in transfers:
        one.wait(PATIENT)


def seed(donor: int, receiver: int, tag: int) -> int:
    return (donor * 100 + receiver) * 10_000 + tag


def fails(act: Callable[[], object], within: float) -> None:
    begun = time.monotonic()
    try:
        act()
    except TransportError:
        took = time.monotonic() - begun
        assert took < within, f"the error came after {took:.1f} s"
    else:
        raise AssertionError("a message succeeded though nobody took it")
