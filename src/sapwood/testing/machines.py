"""Machines that are network namespaces: joined by links of a given rate, with nothing to clean up.

    with Machines(2, gbit=8) as machines:
        subprocess.run(machines.command(1, ["ping", "-c1", machines.address(0)]))

Each machine has a loopback of its own and one interface, which a switch joins to the others. Its
link carries ``gbit`` in each direction. Abstract sockets belong to a namespace, so machines do not
see each other's; files, shared memory and process ids they have in common. It needs root, ``ip``
and ``tc``. ``ranks.spawn(..., machines=[2, 1])`` runs ranks on machines.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from sapwood.errors import ConfigError, UsageError
from sapwood.testing._netspace import Namespace, Unavailable, enter, missing

__all__ = ["INTERFACE", "Machines", "Unavailable", "enter", "missing", "place"]

T = TypeVar("T")

INTERFACE = "eth0"
"""The interface of a machine towards the others, for ``GLOO_SOCKET_IFNAME``."""

# Nothing routes them: the switch is in a namespace without a way out.
_NETWORK = "10.83.0"
_MOST = 250
# Offloaded packets are up to 64 KiB long, so a bucket below that would pass nothing; and it must
# hold what the rate lets through between two wake-ups of the queue.
_BURST_BYTES = 1 << 20
_QUEUE_MS = 50
_TRIAL_SECONDS = 0.8
_TRIAL_WARM_SECONDS = 0.2
_TRIAL_BYTES = 1 << 20
_TIMEOUT = 30.0


class Machines:
    """``count`` machines; a context manager that owns their namespaces."""

    def __init__(
        self, count: int, gbit: float | None = None, *, unlimited: Collection[int] = ()
    ) -> None:
        """``gbit`` is the rate of each machine's link, in Gbit/s; None does not limit it.

        ``unlimited``: machines whose links are not limited, such as one that many others serve.
        """
        if not 1 <= count <= _MOST:
            raise ConfigError(f"count={count} machines, expected 1 to {_MOST}")
        if gbit is not None and not gbit > 0:
            raise ConfigError(f"gbit={gbit}, expected more than 0, or None for no limit")
        self.count, self.gbit = count, gbit
        self._limited = [number for number in range(count) if number not in unlimited]
        self._owned = ExitStack()
        self._machines: list[Namespace] = []

    def __enter__(self) -> Machines:
        """Make the machines.

        Raises:
            Unavailable: They cannot be made here; it says why.
        """
        reason = missing()
        if reason is not None:
            raise Unavailable(reason)
        try:
            switch = self._namespace()
            self._machines = [self._namespace() for _ in range(self.count)]
            self._join(switch)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all machines; what still runs on one keeps a network without links."""
        self._machines = []
        self._owned.close()

    def address(self, machine: int) -> str:
        """The IP address of a machine, which the others can reach."""
        self._machine(machine)
        return f"{_NETWORK}.{machine + 1}"

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on a machine."""
        return self._machine(machine).command(command)

    def namespace(self, machine: int) -> str:
        """The path of a machine's network namespace, for ``enter``."""
        return str(self._machine(machine).path)

    def call(self, machine: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread of this process that is on a machine.

        Sockets it opens, and threads it starts, stay on that machine.
        """
        found: list[T] = []
        raised: list[BaseException] = []
        path = self.namespace(machine)

        def work() -> None:
            try:
                enter(path)
                found.append(function(*args))
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work, name=f"machine-{machine}", daemon=True)
        thread.start()
        thread.join(_TIMEOUT)
        if raised:
            raise raised[0]
        if not found:
            raise Unavailable(f"a call on machine {machine} did not end in {_TIMEOUT:g} s")
        return found[0]

    def measure(self, sender: int = 0, receiver: int = 1) -> float:
        """What one transfer between two machines gets, in Gbit/s."""
        listener = self.call(receiver, socket.create_server, (self.address(receiver), 0))
        with listener:
            listener.settimeout(_TIMEOUT)
            target = listener.getsockname()
            connection = self.call(sender, socket.create_connection, target, _TIMEOUT)
            with connection:
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(_TIMEOUT)
                    return _transfer(connection, accepted)

    def _namespace(self) -> Namespace:
        made = Namespace()
        self._owned.callback(made.close)
        return made

    def _machine(self, number: int) -> Namespace:
        if not self._machines:
            raise UsageError("the machines are not there: use them inside their with block")
        if not 0 <= number < self.count:
            raise ConfigError(f"machine={number}, but there are {self.count}, from 0")
        return self._machines[number]

    def _join(self, switch: Namespace) -> None:
        links = ["link add switch type bridge", "link set switch up"]
        for number, machine in enumerate(self._machines):
            port = f"port{number}"
            links += [
                f"link add {port} type veth peer name {INTERFACE} netns {machine.pid}",
                f"link set {port} master switch",
                f"link set {port} up",
            ]
        _ip(switch, links)
        for number, machine in enumerate(self._machines):
            own = f"addr add {self.address(number)}/24 dev {INTERFACE}"
            _ip(machine, [own, f"link set {INTERFACE} up"])
        if self.gbit is not None:
            shape = f"root tbf rate {self.gbit * 1000:.0f}mbit burst {_BURST_BYTES}"
            limit = f"{shape} latency {_QUEUE_MS}ms"
            ports = [f"qdisc add dev port{number} {limit}\n" for number in self._limited]
            switch.run("".join(ports), ["tc", "-batch", "-"])
            for number in self._limited:
                self._machines[number].run(
                    f"qdisc add dev {INTERFACE} {limit}\n", ["tc", "-batch", "-"]
                )


def place(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring ranks on one machine: (machine, local rank) of each rank, in order."""
    if not sizes or any(size < 1 for size in sizes):
        raise ConfigError(f"machines={list(sizes)}, expected the number of ranks of each machine")
    return [(machine, local) for machine, size in enumerate(sizes) for local in range(size)]


def _ip(namespace: Namespace, commands: Sequence[str]) -> None:
    namespace.run("".join(f"{command}\n" for command in commands), ["ip", "-batch", "-"])


def _transfer(sender: socket.socket, receiver: socket.socket) -> float:
    """Gbit/s after a short warm-up, in which the burst of the limit passes for free."""
    stop = threading.Event()

    def send() -> None:
        block = bytes(_TRIAL_BYTES)
        while not stop.is_set():
            sender.sendall(block)
        sender.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send, name="machines-trial", daemon=True)
    thread.start()
    buffer = bytearray(_TRIAL_BYTES)
    began, count, end = time.perf_counter(), 0, 0.0
    start = 0.0
    while length := receiver.recv_into(buffer):
        now = time.perf_counter()
        if start and now < start + _TRIAL_SECONDS:
            count, end = count + length, now
        elif start:
            stop.set()
        elif now >= began + _TRIAL_WARM_SECONDS:
            start = now
    thread.join(_TIMEOUT)
    if end <= start:
        raise Unavailable("the trial transfer between two machines gave nothing")
    return count * 8 / (end - start) / 1e9
