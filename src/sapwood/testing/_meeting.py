"""Where the ranks of a group meet, and what a launcher would tell each of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, TypeVar

from torch._C._distributed_c10d import TCPStore

from sapwood.errors import ConfigError
from sapwood.testing.machines import INTERFACE, Machines, place

__all__ = ["Meeting", "Store", "inherited_env"]

Store = Literal["parent", "rank0"]
T = TypeVar("T")


class Meeting:
    """The rendezvous store of one group and, if it has them, its machines; it owns both."""

    def __init__(
        self, world: int, store: Store, machines: Sequence[int] | None, gbit: float | None
    ) -> None:
        self._world = world
        self._sizes = _sizes(world, machines, gbit)
        self._places = place(self._sizes)
        self._owned = ExitStack()
        self._machines: Machines | None = None
        try:
            if machines is not None:
                self._machines = self._owned.enter_context(Machines(len(machines), gbit))
            self._host = self._on_first(_host_store) if store == "parent" else None
            self._port = self._host.port if self._host is not None else self._on_first(_free_port)
        except BaseException:
            self.close()
            raise

    def env(self, number: int) -> dict[str, str]:
        """What torchrun's environment tells this rank."""
        machine, local = self._places[number]
        alone = self._machines is None
        env = {
            "RANK": str(number),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._sizes[machine]),
            "GROUP_RANK": str(machine),
            "GROUP_WORLD_SIZE": str(len(self._sizes)),
            "MASTER_ADDR": "127.0.0.1" if self._machines is None else self._machines.address(0),
            "MASTER_PORT": str(self._port),
            # Without it gloo looks up the host's name, which need not resolve where tests run.
            "GLOO_SOCKET_IFNAME": "lo" if alone else INTERFACE,
        }
        if self._host is not None:
            env |= {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_RUN_ID": "sapwood-testing",
            }
        return env

    def namespace(self, number: int) -> str | None:
        """The network namespace this rank runs in, unless it is our own."""
        if self._machines is None:
            return None
        return self._machines.namespace(self._places[number][0])

    def close(self) -> None:
        """Release the store and the machines."""
        self._host = None
        self._owned.close()

    def _on_first(self, function: Callable[[], T]) -> T:
        return function() if self._machines is None else self._machines.call(0, function)


def inherited_env() -> dict[str, str]:
    """Our environment, for a rank."""
    # This process may itself have been started by a launcher, which is not the ranks' launcher.
    return {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}


def _sizes(world: int, machines: Sequence[int] | None, gbit: float | None) -> list[int]:
    if machines is None:
        if gbit is not None:
            raise ConfigError(f"gbit={gbit} is the rate of links between machines; give machines=")
        return [world]
    if sum(machines) != world:
        raise ConfigError(f"machines={list(machines)} have {sum(machines)} ranks, not {world}")
    return list(machines)


def _host_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
