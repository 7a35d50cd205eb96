"""Messages through shared memory, between processes of one user on one machine.

Once its receive is posted, a message is copied by its receiver, straight out of the sender's
memory. Where the system does not let one process read another, each side of a pair has a small ring
of slots in a memfd, which the other maps: a message is copied into free slots, and out of them. A
Unix socket carries what tells of it. One thread per link does all copying, so nothing blocks but
whoever waits. Nothing has a name in the file system: the sockets are abstract, and the memory goes
with the last process that maps it.
"""

from __future__ import annotations

import os
import secrets
import socket

from sapwood.channel.descriptors import receive_with_fds
from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.peer import peer_process
from sapwood.runtime.stores import Store
from sapwood.transport._meet import BACKLOG, HELLO, Deadline, accept, exchange, late
from sapwood.transport._pump import Pump, PumpLink
from sapwood.transport._reads import Permission, probe
from sapwood.transport._ring import Ring, RingError
from sapwood.transport.base import Ends

__all__ = ["open_memory"]


def open_memory(store: Store, ends: Ends, *, reads: bool = True) -> PumpLink:
    """Meet the others: donors listen, receivers come to each of them.

    Without ``reads`` no process reads another's memory; each says so for its own.
    """
    if not ends.one_machine:
        raise ConfigError(
            f"transport 'memory' is for one machine, but the processes are on "
            f"{', '.join(sorted(set(ends.hosts)))}; use 'gloo' or 'auto'"
        )
    deadline = Deadline(ends.timeout)
    token = secrets.token_bytes(32)
    wires: dict[int, socket.socket] = {}
    rings: dict[int, tuple[Ring, Ring]] = {}
    readable: set[int] = set()
    permission = Permission()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen(BACKLOG)
        mine = [listener.getsockname().hex(), token.hex()]
        met = exchange("memory", store, ends, mine, deadline)
        try:
            if ends.me < ends.donors:
                accept(listener, token, ends, deadline, wires, _check_user)
            else:
                _connect(met, ends, deadline, wires)
            for peer, wire in wires.items():
                rings[peer] = _swap(wire, peer, deadline)
                if probe(wire) and reads:
                    readable.add(peer)
            return PumpLink("memory", Pump(wires, rings, readable, permission))
        except BaseException as error:
            permission.give_back()
            for one in wires.values():
                one.close()
            for pair in rings.values():
                for ring in pair:
                    ring.close()
            if isinstance(error, TimeoutError):
                raise late("memory", "another process", ends.timeout) from error
            if isinstance(error, OSError):
                raise TransportError(f"memory: cannot meet the others: {error}") from error
            raise


def _connect(
    met: list[tuple[str, str]], ends: Ends, deadline: Deadline, wires: dict[int, socket.socket]
) -> None:
    for peer in ends.peers:
        name, token = (bytes.fromhex(one) for one in met[peer])
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wires[peer] = wire
        wire.settimeout(deadline.left or 0.001)
        wire.connect(name)
        _check_user(wire)
        wire.send(HELLO.pack(ends.me, token))


def _check_user(wire: socket.socket) -> None:
    _, user = peer_process(wire)
    if user != os.getuid():
        raise TransportError(
            f"memory: a process of user {user} came to a transfer of user {os.getuid()}; "
            "both runs must be of one user, or use 'gloo'"
        )


def _swap(wire: socket.socket, peer: int, deadline: Deadline) -> tuple[Ring, Ring]:
    """Give the peer our ring and map its own: ours, theirs."""
    wire.settimeout(deadline.left or 0.001)
    ours = Ring.make()
    try:
        socket.send_fds(wire, [b"ring"], [ours.fd])
        told, fds, _ = receive_with_fds(wire, 16, 1)
        if told != b"ring" or len(fds) != 1:
            raise TransportError(f"memory: process {peer} left while the link was opened")
        return ours, Ring.of(fds[0])
    except BaseException as error:
        ours.close()
        if isinstance(error, RingError):
            raise TransportError(f"memory: process {peer}: {error}") from error
        raise
