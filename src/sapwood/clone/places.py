"""Where the ranks of a fork are: their hosts, and the devices of their tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.group import Group
from sapwood.runtime.host import Hosts, host_toward, machine_key

__all__ = ["Places"]


@dataclass(frozen=True, slots=True)
class Places:
    """Of some ranks, in their order."""

    hosts: tuple[str, ...]
    """The address under which the others reach each."""
    devices: tuple[str, ...]
    """"cpu" where a model is on several devices: its tensors then go through CPU memory."""
    machines: tuple[str, ...]
    """The ``machine_key`` of each."""

    @classmethod
    def of_donors(cls, group: Group, model: nn.Module, hosts: Hosts) -> Places:
        """Of all ranks of a training; all of them must call it."""
        devices = tuple(group.gather_text("device", _device(model)))
        return cls(hosts.addresses, devices, hosts.machines)

    @classmethod
    def of_clones(cls, group: Group, model: nn.Module, donors: str) -> Places:
        """Of all ranks of a fork, as the ``donors`` at this address reach them; all must call it.

        Raises:
            ConfigError: ``SAPWOOD_HOST`` of a rank is no address of its machine.
        """
        host = problem = ""
        try:
            host = host_toward(donors)
        except ConfigError as error:
            problem = f"rank {group.rank}: {error}"
        mine = json.dumps([host, _device(model), machine_key(), problem])
        rows = [json.loads(one) for one in group.gather_text("place", mine)]
        for *_, problem in rows:
            if problem:
                raise ConfigError(problem)
        return cls.from_json([row[:3] for row in rows])

    @classmethod
    def from_json(cls, rows: Sequence[Any]) -> Places:
        """The reverse of ``to_json``.

        Raises:
            CloneError: these are no places.
        """
        try:
            found = [(str(host), str(device), str(machine)) for host, device, machine in rows]
        except (TypeError, ValueError) as error:
            raise CloneError(f"{rows!r} says nowhere where ranks are: {error}") from error
        return cls(*(tuple(row[n] for row in found) for n in range(3)))

    def to_json(self) -> list[list[str]]:
        """Plain."""
        return [list(row) for row in zip(self.hosts, self.devices, self.machines, strict=True)]

    def __add__(self, others: Places) -> Places:
        """These, then the others."""
        return Places(
            self.hosts + others.hosts,
            self.devices + others.devices,
            self.machines + others.machines,
        )


def _device(model: nn.Module) -> str:
    found = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    return found.pop() if len(found) == 1 else "cpu"
