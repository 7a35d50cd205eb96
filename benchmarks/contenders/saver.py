"""What a peer is: a way to save and load the state of a DistributedDataParallel training.

A peer gets what it needs to be at its best: a process group of its own, kept buffers, and in-place
loading into state that exists already. Its packages are imported when it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from core.rank import COLLECTIVE_TIMEOUT, Context
from torch import nn

from .training import optimizer_tensors

WAIT = COLLECTIVE_TIMEOUT.total_seconds()


class Saver(ABC):
    """One way to save. ``save`` and ``before_update`` are what training waits for."""

    syncs = False
    """Whether the files are durable when ``wait`` returns."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, context: Context
    ) -> None:
        self.model, self.optimizer, self.context = model, optimizer, context

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    def before_update(self) -> None:
        """Before the first update after a save."""
        return

    def wait(self) -> None:
        """Until the peer itself says that it is done."""
        return

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Into the live tensors; all ranks call it."""

    def close(self) -> None:
        """Nothing is kept."""
        return

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


class BufferCopies:
    """Copies of what forward changes, for peers that read the state while it runs.

    They guard the update and not forward, so statistics of BatchNorm would be saved half new. The
    copies are kept, so that a peer which remembers tensors finds them again.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict().keys()
        self.live = {name: live for name, live in model.named_buffers() if name in saved}
        self.copies = {name: live.clone() for name, live in self.live.items()}

    def in_place_of(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.live.values()))
        return {**state, "model": {**state["model"], **self.copies}}


def copy_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """In place: cheaper than load_state_dict, which makes new tensors."""
    with torch.no_grad():
        for number, name, tensor in optimizer_tensors(optimizer):
            tensor.copy_(state[number][name])
