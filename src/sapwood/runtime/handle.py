"""What a system sees of a run: this and nothing more, so that no system imports another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sapwood.errors import ConfigError
from sapwood.events import EventBus
from sapwood.runtime.group import Group
from sapwood.state.extras import Stateful, things_by_name
from sapwood.state.modules import EXTRA_STATE, ExtraState
from sapwood.trace import Tracer

__all__ = ["Parent", "RunHandle", "run_state", "with_run_state"]


class Parent(Protocol):
    """Where a forked run came from."""

    @property
    def run(self) -> str:
        """The parent's id."""
        ...

    @property
    def step(self) -> int:
        """The step after which the two went their own ways."""
        ...

    @property
    def overrides(self) -> Mapping[str, Any]:
        """What is different in the fork, by path."""
        ...


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
    def tuner(self) -> Stateful:
        """Holds the engine's choices that were made by measurement."""
        ...

    @property
    def step_count(self) -> int:
        """Steps ended so far."""
        ...

    @property
    def forked_from(self) -> Parent | None:
        """The run this one is a fork of, if it is one."""
        ...

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names per bucket; empty before the first backward."""
        ...

    @property
    def shares_buffers(self) -> bool:
        """Whether every rank gets rank 0's buffers when a step ends."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by name."""
        ...

    def fence_wait(self, owner: str) -> float:
        """Seconds updates have waited for an owner's holds so far."""
        ...

    def check_between_steps(self, what: str) -> None:
        """See that the state is that of a step; ``what`` is called, for the message.

        Raises:
            UsageError: a step has begun and not ended, or the run is closed.
        """
        ...

    def wait_ready(self) -> None:
        """Wait, in a fork, until its whole state is there."""
        ...

    def resume_at(self, step: int) -> None:
        """Go on as if ``step`` steps had ended: their state has just been restored."""
        ...


def run_state(run: RunHandle) -> dict[str, Stateful]:
    """What belongs to a run beside its optimizer, by name: schedulers, a gradient scaler, ..."""
    named: dict[str, Stateful] = {f"scheduler {n}": s for n, s in enumerate(run.schedulers)}
    named["bucket sizes"] = run.tuner
    if extra := ExtraState(run.model):
        named[EXTRA_STATE] = extra
    if run.scaler is not None:
        named["scaler"] = run.scaler
    return named


def with_run_state(run: RunHandle, shared: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """What belongs to a run, and what a script shares, in one.

    Raises:
        ConfigError: one cannot be saved, or has the name of another, which would be lost.
    """
    of_run, given = run_state(run), things_by_name("shared", shared)
    for name, thing in given.items():
        if of_run.get(name, thing) is not thing:
            raise ConfigError(
                f"shared has a {name!r}, which is what the run's own is called; use another name"
            )
    return {**of_run, **given}
