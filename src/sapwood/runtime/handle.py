"""What a system sees of a run: this and nothing more, so that no system imports another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sapwood.events import EventBus
from sapwood.runtime.group import Group
from sapwood.trace import Tracer

__all__ = ["RunHandle"]


class RunHandle(Protocol):
    """A running training, as checkpoint, clone and store use it."""

    @property
    def id(self) -> str:
        """The run's id, also the name of its folder."""
        ...

    @property
    def folder(self) -> Path:
        """``runs/<id>``."""
        ...

    @property
    def group(self) -> Group:
        """The ranks that train this model."""
        ...

    @property
    def events(self) -> EventBus:
        """Where to subscribe."""
        ...

    @property
    def trace(self) -> Tracer:
        """Where to leave spans."""
        ...

    @property
    def model(self) -> nn.Module:
        """What the training loop calls."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Holds all optimizer state, whatever updates it."""
        ...

    @property
    def schedulers(self) -> Sequence[Any]:
        """What is stepped at the end of each step."""
        ...

    @property
    def scaler(self) -> Any | None:
        """The gradient scaler, if there is one."""
        ...

    @property
    def step_count(self) -> int:
        """Steps ended so far."""
        ...

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names per bucket; empty before the first backward."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by name."""
        ...

    def fence_wait(self, owner: str) -> float:
        """Seconds updates have waited for an owner's holds so far."""
        ...

    def resume_at(self, step: int) -> None:
        """Go on as if ``step`` steps had ended: their state has just been restored."""
        ...
