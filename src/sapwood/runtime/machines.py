"""Which ranks share a machine, found by the ranks themselves, and a link between those that do.

Two ranks share a machine if one can hand the other a file descriptor: that is what shared memory
needs, and neither a host name nor a launcher's variable says it (containers, hybrid groups). So
each rank listens on an abstract Unix socket, which only its own network namespace can reach, and
connects to every rank that seems to be on the same machine. The connections stay: a descriptor or
a short message travels on them, and their end is how a neighbour's death is noticed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import cast

from sapwood.errors import DeadlineError, SapwoodError
from sapwood.runtime.group import Group
from sapwood.runtime.host import machine_key
from sapwood.runtime.peer import peer_process

__all__ = ["Links", "Machines", "find_machines"]

log = logging.getLogger(__name__)

_HELLO = struct.Struct("<32sI")
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The ranks of a group by machine; machines are in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Sequence[str]) -> Machines:
        """Ranks with equal keys share a machine."""
        by_key: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            by_key.setdefault(key, []).append(rank)
        return cls(ranks=tuple(tuple(ranks) for ranks in by_key.values()))

    @classmethod
    def apart(cls, world: int) -> Machines:
        """Every rank on a machine of its own."""
        return cls(ranks=tuple((rank,) for rank in range(world)))

    @property
    def shared(self) -> bool:
        """Whether some machine has two ranks or more."""
        return any(len(ranks) > 1 for ranks in self.ranks)

    @property
    def lanes(self) -> int:
        """How many ranks every machine can put on the wire at once."""
        return min(len(ranks) for ranks in self.ranks)

    def lane(self, number: int) -> tuple[int, ...]:
        """The ranks that exchange one lane's part of a message, one of each machine."""
        return tuple(ranks[number] for ranks in self.ranks)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The ranks on the machine of ``rank``, itself included."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def __str__(self) -> str:
        """For people: ``2 machines: 0-3 | 4-7``."""
        count = len(self.ranks)
        shown = " | ".join(_spans(ranks) for ranks in self.ranks)
        return f"{count} machine{'s' * (count != 1)}: {shown}"


class Links:
    """A connection to each other rank of this machine; ends with ``close``, or with the process."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        """``sockets`` by rank: connected, authenticated, message by message."""
        self.sockets = sockets
        self.pid = os.getpid()
        _open.add(self)

    def __iter__(self) -> Iterator[tuple[int, socket.socket]]:
        """Rank and connection, in the order of ranks."""
        return iter(sorted(self.sockets.items()))

    def close(self) -> None:
        """Close all connections."""
        for link in self.sockets.values():
            link.close()
        self.sockets = {}


# A forked child (a data loader's worker) must not keep a dead rank's connections open: neighbours
# would take that rank for alive for as long as the child lives.
_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    for links in list(_open):
        links.close()


os.register_at_fork(after_in_child=_close_in_child)


def find_machines(group: Group) -> tuple[Machines, Links, str]:
    """The machines of ``group``, this rank's links, and what kept ranks from sharing one, if any.

    Every rank calls it; every rank gets the same machines. Where one rank cannot link up with a
    neighbour, all of them count every rank as alone.
    """
    if group.world == 1:
        return Machines.apart(1), Links({}), ""
    token = group.secret("machines")
    links = Links({})
    try:
        with ExitStack() as opened:
            listener, problem = _try_to_listen(token, group.rank, opened)
            said = group.gather_text("machine", json.dumps([machine_key(), problem]))
            machines = Machines.of([json.loads(text)[0] for text in said])
            # Known before anybody connects: nobody waits for a rank that does not listen.
            problems = _of_neighbours(machines, [json.loads(text)[1] for text in said])
            if not problems:
                problems = _link_all(group, token, listener, machines, links)
    except BaseException:
        links.close()
        raise
    if problems:
        links.close()
        log.warning("ranks of one machine cannot share memory (%s)", problems[0])
        return Machines.apart(group.world), links, problems[0]
    return machines, links, ""


def _try_to_listen(token: str, rank: int, opened: ExitStack) -> tuple[socket.socket | None, str]:
    """A listener that ``opened`` closes, or what keeps this rank from having one."""
    try:
        return opened.enter_context(closing(_listener(token, rank))), ""
    except (OSError, AttributeError) as error:  # the latter: a Python without AF_UNIX
        return None, f"rank {rank}: no listener on an abstract Unix socket: {error}"


def _of_neighbours(machines: Machines, problems: Sequence[str]) -> list[str]:
    """The problems of ranks that share a machine: one that is alone needs no links."""
    return [p for rank, p in enumerate(problems) if p and len(machines.of_rank(rank)) > 1]


def _link_all(
    group: Group, token: str, listener: socket.socket | None, machines: Machines, links: Links
) -> list[str]:
    """Link up with the neighbours; what kept any rank of the group from it."""
    problem = ""
    try:
        if listener is not None:
            _link(group, token, listener, machines.of_rank(group.rank), links.sockets)
    except (OSError, SapwoodError) as error:
        problem = f"rank {group.rank}: {error}"
    return [p for p in group.gather_text("links inside machines", problem) if p]


def _name(token: str, rank: int) -> str:
    # Half of the token is in the name, which every user of the machine can list; half is the proof.
    return f"\0sapwood-{token[:16]}-{rank}"


def _listener(token: str, rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_name(token, rank))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _link(
    group: Group,
    token: str,
    listener: socket.socket,
    members: Sequence[int],
    found: dict[int, socket.socket],
) -> None:
    """Connect to lower ranks, accept higher ones. All listen already: no circle of waiting."""
    # Whoever cannot connect says so in what all gather next: be there before they lose patience.
    deadline = time.monotonic() + min(_PATIENCE, group.timeout / 2)
    secret = token[16:].encode()
    for rank in members:
        if rank < group.rank:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found[rank] = link
            link.settimeout(_left(deadline))
            link.connect(_name(token, rank))
            _check_user(link)
            link.send(_HELLO.pack(secret, group.rank))
    missing = {rank for rank in members if rank > group.rank}
    for rank, link in _accepted(listener, secret, missing, deadline):
        found[rank] = link
        link.send(_HELLO.pack(secret, group.rank))
    for rank in members:
        if rank < group.rank:
            found[rank].settimeout(_left(deadline))
            answer = found[rank].recv(_HELLO.size)
            if answer != _HELLO.pack(secret, rank):
                raise ConnectionError(f"rank {rank} did not answer as a rank of this group")
    for link in found.values():
        link.setblocking(False)


def _accepted(
    listener: socket.socket, secret: bytes, missing: set[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """The ranks that connect, as they come. A stranger who says nothing keeps nobody waiting."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as strangers:
        selector.register(listener, selectors.EVENT_READ)
        while missing:
            for key, _ in selector.select(_left(deadline)):
                if key.fileobj is listener:
                    with suppress(OSError), ExitStack() as stranger:
                        link = stranger.enter_context(listener.accept()[0])
                        _check_user(link)
                        link.setblocking(False)
                        selector.register(link, selectors.EVENT_READ)
                        strangers.push(stranger.pop_all())
                    continue
                link = cast(socket.socket, key.fileobj)
                selector.unregister(link)
                rank = _greeted(link, secret, missing)
                if rank is None:
                    link.close()
                    continue
                missing.discard(rank)
                # A twin, as the original is closed with the strangers.
                yield rank, link.dup()


def _greeted(link: socket.socket, secret: bytes, missing: set[int]) -> int | None:
    """The rank behind a connection that has said something; None for a stranger."""
    with suppress(OSError, struct.error):
        shown, rank = _HELLO.unpack(link.recv(_HELLO.size + 1))
        if hmac.compare_digest(shown.rstrip(b"\0"), secret) and rank in missing:
            return int(rank)
    return None


def _check_user(link: socket.socket) -> None:
    user = peer_process(link)[1]
    if user != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user}, not to {os.geteuid()}")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("a rank of the same machine did not connect in time")
    return left


def _spans(ranks: Sequence[int]) -> str:
    """``0-3, 6``: runs of neighbours."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
