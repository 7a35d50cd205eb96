"""The contract of a transport: bytes from the memory of one process into that of another.

Some processes meet for one transfer: donors first, then receivers, numbered through. They know a
common store, through which a transport exchanges whatever addresses it needs, and they have agreed
on the size of every message before: a transport need not notice a message of another size.

A link is never used again after an error; whoever has one closes it and may open another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sapwood.runtime.stores import Store

__all__ = ["Data", "Ends", "Link", "Opener", "Transfer"]

Data = Tensor | Sequence[Tensor]
"""A message; several tensors only where a link gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who meets, and who of them this process is."""

    me: int
    """This process's number: donors are 0 .. donors - 1, receivers follow."""
    donors: int
    hosts: tuple[str, ...]
    """The address of each process, by number: under which the others reach it."""
    timeout: float
    """Seconds to wait for the others when a link is opened."""
    machines: tuple[str, ...] = ()
    """The machine of each process, by number; without them, equal hosts are one machine."""

    @property
    def size(self) -> int:
        """How many meet."""
        return len(self.hosts)

    @property
    def one_machine(self) -> bool:
        """Whether all processes share memory, abstract sockets and loopback."""
        return len(set(self.machines or self.hosts)) == 1

    @property
    def peers(self) -> range:
        """The numbers of the other side."""
        first, last = (self.donors, self.size) if self.me < self.donors else (0, self.donors)
        return range(first, last)


class Transfer(Protocol):
    """A message under way."""

    def wait(self, timeout: float) -> None:
        """Return when a sent message's memory may change, or a received one's is filled.

        Raises:
            TransportError: the other side is gone, or it took longer than ``timeout`` seconds;
                the link is of no use any more.
        """
        ...


class Link(Protocol):
    """One process's end of an open transfer. Calls may come from several threads.

    Messages are told apart by ``tag``, which is used once per direction and pair; receives may be
    posted in any order, before or after the message is sent. ``data`` is a contiguous tensor of
    bytes (uint8), read or written in place where the transport can, until the transfer is over.
    """

    @property
    def name(self) -> str:
        """As in settings and messages: gloo, memory, mpi, mooncake."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether a message may be several tensors in a row, cut differently on either side."""
        ...

    def send(self, peer: int, tag: int, data: Any) -> Transfer:
        """Begin to send ``Data``; ``peer`` is a number of the other side."""
        ...

    def recv(self, peer: int, tag: int, data: Any) -> Transfer:
        """Begin to receive."""
        ...

    def close(self) -> None:
        """End at once, whatever is under way; nothing stays behind. Never waits for peers."""
        ...


class Opener(Protocol):
    """How a transport is entered; all processes of a transfer call it at about the same time."""

    def __call__(self, store: Store, ends: Ends) -> Link:
        """Meet the others.

        Raises:
            TransportError: not all came within ``ends.timeout`` seconds, or they cannot be reached
                this way.
            ConfigError: the transport is not installed, or does not work here; what to do.
        """
        ...
