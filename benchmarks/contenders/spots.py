"""Where the donors and the clones of a fork are: on one machine, on two, or each on its own."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Any

from core import NotRun, Spot
from core.ranks import Wrap

ONE, TWO, OWN = "one", "two", "own"
GBIT = 8.0
"""The link of each machine, in both directions."""


class Spots:
    """Spots of both sides; machines end with ``owned``."""

    def __init__(self, machines: str, ranks: int, owned: ExitStack) -> None:
        self.machines: Any = None
        self.donors, self.clones = [Spot()] * ranks, [Spot()] * ranks
        self.fact = ""
        if machines == ONE:
            return
        from sapwood.testing.machines import Machines, Unavailable

        count = 2 if machines == TWO else 2 * ranks
        try:
            self.machines = owned.enter_context(Machines(count, GBIT))
            self.fact = f"{self.machines.measure():.2f} Gbit/s measured, {GBIT:g} nominal"
        except Unavailable as reason:
            raise NotRun(str(reason)) from reason
        places = [0] * ranks + [1] * ranks if machines == TWO else list(range(count))
        spots = [self.spot(machine) for machine in places]
        self.donors, self.clones = spots[:ranks], spots[ranks:]

    def spot(self, machine: int) -> Spot:
        from sapwood.testing.machines import INTERFACE

        address = self.machines.address(machine)
        return Spot(wrap=self.named(machine, address), address=address, interface=INTERFACE)

    def named(self, machine: int, name: str) -> Wrap:
        """Machines have names of their own; as an address it is one that peers can resolve."""

        def wrap(command: list[str]) -> list[str]:
            script = f"hostname {shlex.quote(name)} && exec {shlex.join(command)}"
            inside = ["unshare", "--uts", "sh", "-c", script]
            found: list[str] = self.machines.command(machine, inside)
            return found

        return wrap
