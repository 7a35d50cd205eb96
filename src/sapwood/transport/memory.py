"""Messages through shared memory, between processes of one user on one machine.

Each side of a pair has a small ring of slots in a memfd, which the other maps. A message is copied
into free slots once its receive is posted, and out of them; a Unix socket carries what tells of it.
One thread per link does all copying, so nothing blocks but whoever waits. Nothing has a name in the
file system: the sockets are abstract, and the memory goes with the last process that maps it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct

from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.stores import Store
from sapwood.transport._meet import Deadline, exchange, late, one_host
from sapwood.transport._pump import Pump, PumpLink
from sapwood.transport._ring import Ring, RingError
from sapwood.transport.base import Ends

__all__ = ["open_memory"]

_HELLO = struct.Struct("!I32s")  # number, token
_CREDENTIALS = struct.Struct("3i")


def open_memory(store: Store, ends: Ends) -> PumpLink:
    """Meet the others: donors listen, receivers come to each of them."""
    if not one_host(ends):
        raise ConfigError(
            f"transport 'memory' is for one machine, but the processes are on "
            f"{', '.join(sorted(set(ends.hosts)))}; use 'gloo' or 'auto'"
        )
    deadline = Deadline(ends.timeout)
    token = secrets.token_bytes(32)
    wires: dict[int, socket.socket] = {}
    rings: dict[int, tuple[Ring, Ring]] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen(ends.size)
        mine = [listener.getsockname().hex(), token.hex()]
        met = exchange("memory", store, ends, mine, deadline)
        try:
            if ends.me < ends.donors:
                _accept(listener, token, ends, deadline, wires)
            else:
                _connect(met, ends, deadline, wires)
            for peer, wire in wires.items():
                rings[peer] = _swap(wire, peer, deadline)
            return PumpLink("memory", Pump(wires, rings))
        except BaseException as error:
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


def _accept(
    listener: socket.socket,
    token: bytes,
    ends: Ends,
    deadline: Deadline,
    wires: dict[int, socket.socket],
) -> None:
    while len(wires) < len(ends.peers):
        listener.settimeout(deadline.left or 0.001)
        wire, _ = listener.accept()
        try:
            wire.settimeout(deadline.left or 0.001)
            hello = wire.recv(_HELLO.size)
            number, told = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
            if hmac.compare_digest(told, token) and number in ends.peers and number not in wires:
                _check_user(wire)
                wires[number] = wire
                continue
        except TransportError:
            wire.close()
            raise
        except OSError:
            pass  # a stranger, or one that died; ours come until the deadline
        wire.close()


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
        wire.send(_HELLO.pack(ends.me, token))


def _check_user(wire: socket.socket) -> None:
    raw = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
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
        told, fds, _, _ = socket.recv_fds(wire, 16, 1)
        if told != b"ring" or len(fds) != 1:
            raise TransportError(f"memory: process {peer} left while the link was opened")
        return ours, Ring.of(fds[0])
    except BaseException as error:
        ours.close()
        if isinstance(error, RingError):
            raise TransportError(f"memory: process {peer}: {error}") from error
        raise
