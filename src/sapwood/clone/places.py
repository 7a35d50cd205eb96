"""Where the ranks of a fork are: their hosts, and the devices of their tensors."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sapwood.errors import CloneError
from sapwood.runtime.group import Group

__all__ = ["Places"]


@dataclass(frozen=True, slots=True)
class Places:
    """Of some ranks, in their order."""

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    """"cpu" where a model is on several devices: its tensors then go through CPU memory."""

    @classmethod
    def gather(cls, group: Group, model: nn.Module) -> Places:
        """Of all ranks of a group; all of them must call it."""
        mine = json.dumps([platform.node(), _device(model)])
        return cls.from_json([json.loads(one) for one in group.gather_text("place", mine)])

    @classmethod
    def from_json(cls, rows: Sequence[Any]) -> Places:
        """The reverse of ``to_json``.

        Raises:
            CloneError: these are no places.
        """
        try:
            pairs = [(str(host), str(device)) for host, device in rows]
        except (TypeError, ValueError) as error:
            raise CloneError(f"{rows!r} says nowhere where ranks are: {error}") from error
        return cls(tuple(host for host, _ in pairs), tuple(device for _, device in pairs))

    def to_json(self) -> list[list[str]]:
        """Plain."""
        return [list(pair) for pair in zip(self.hosts, self.devices, strict=True)]

    def __add__(self, others: Places) -> Places:
        """These, then the others."""
        return Places(self.hosts + others.hosts, self.devices + others.devices)


def _device(model: nn.Module) -> str:
    found = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    return found.pop() if len(found) == 1 else "cpu"
