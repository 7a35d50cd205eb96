"""A process manager for ranks that want MPI: they were not started by mpiexec, but by us.

MPICH asks its manager over a socket (PMI, version 1): who am I, who shares my machine, and what did
the others put into the common table. One thread here answers all ranks of a group.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Not PMI's own names: only who starts MPI is to see them, and launchers are told apart by those.
DESCRIPTOR, RANK, SIZE = "SAPWOOD_BENCH_PMI_FD", "SAPWOOD_BENCH_PMI_RANK", "SAPWOOD_BENCH_PMI_SIZE"
NAMES = {"PMI_FD": DESCRIPTOR, "PMI_RANK": RANK, "PMI_SIZE": SIZE}


class Manager:
    """Owns a socket to each rank; ``close`` ends the thread that serves them."""

    def __init__(self, world: int, per_machine: int) -> None:
        """Ranks are placed in blocks of ``per_machine``, which share memory."""
        self.world = world
        machines = -(-world // per_machine)
        self.name = f"bench_{secrets.token_hex(6)}"
        self.table = {"PMI_process_mapping": f"(vector,(0,{machines},{per_machine}))"}
        self.waiting: list[socket.socket] = []
        pairs = [socket.socketpair() for _ in range(world)]
        self.ours = [ours for ours, _ in pairs]
        self.theirs = [theirs for _, theirs in pairs]
        self.buffers: dict[socket.socket, bytes] = dict.fromkeys(self.ours, b"")
        self.wake, self.woken = socket.socketpair()
        self.thread = threading.Thread(target=self.serve, name="pmi", daemon=True)
        self.thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        return {
            DESCRIPTOR: str(self.theirs[rank].fileno()),
            RANK: str(rank),
            SIZE: str(self.world),
        }

    def descriptor(self, rank: int) -> int:
        """To be inherited by that rank."""
        return self.theirs[rank].fileno()

    def started(self) -> None:
        """All ranks have their end now; with ours closed, a rank's end is noticed."""
        for one in self.theirs:
            one.close()

    def close(self) -> None:
        self.wake.close()
        self.thread.join(10)
        for one in (*self.ours, *self.theirs, self.woken):
            one.close()

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (*self.ours, self.woken):
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.woken:
                        return
                    if not self.hear(key.fileobj):
                        selector.unregister(key.fileobj)

    def hear(self, rank: socket.socket) -> bool:
        """Whether the rank is still there."""
        try:
            piece = rank.recv(1 << 16)
        except OSError:
            return False
        *lines, self.buffers[rank] = (self.buffers[rank] + piece).split(b"\n")
        for line in lines:
            self.answer(rank, dict(word.split("=", 1) for word in line.decode().split()))
        return bool(piece)

    def answer(self, rank: socket.socket, said: dict[str, str]) -> None:
        if said["cmd"] == "barrier_in":
            self.waiting.append(rank)
            if len(self.waiting) == self.world:
                for one in self.waiting:
                    one.sendall(b"cmd=barrier_out rc=0\n")
                self.waiting = []
            return
        rank.sendall(self.reply(said).encode() + b"\n")

    def reply(self, said: dict[str, str]) -> str:
        match said["cmd"]:
            case "init":
                return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
            case "get_maxes":
                return "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"
            case "get_appnum":
                return "cmd=appnum rc=0 appnum=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname rc=0 kvsname={self.name}"
            case "get_universe_size":
                return f"cmd=universe_size rc=0 size={self.world}"
            case "put":
                self.table[said["key"]] = said["value"]
                return "cmd=put_result rc=0 msg=success"
            case "get" if said["key"] in self.table:
                return f"cmd=get_result rc=0 msg=success value={self.table[said['key']]}"
            case "get":
                return "cmd=get_result rc=-1 msg=unknown_key value=unknown"
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case other:
                return f"cmd={other}_result rc=-1"


@contextmanager
def managed() -> Iterator[None]:
    """In a rank: MPI started inside the block finds its manager. Needs a group with MPI."""
    found = {name: os.environ[ours] for name, ours in NAMES.items()}
    os.environ.update(found)
    try:
        yield
    finally:
        for name in found:
            del os.environ[name]
