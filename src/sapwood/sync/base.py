"""The contract every engine fulfils, and the settings they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import nn

from sapwood.errors import ConfigError
from sapwood.events import EventBus
from sapwood.runtime.group import Group
from sapwood.sync.averaging import Averaging
from sapwood.sync.optim import UpdateMode, Views
from sapwood.sync.tune import Tuner
from sapwood.trace import Tracer

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

__all__ = ["Context", "StepOutcome", "SyncSettings", "SyncStats", "Synchroniser"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """How gradients are averaged and weights updated."""

    engine: Literal["layerwise", "ddp"] = "layerwise"
    """``layerwise``: Sapwood's reducer. ``ddp``: DistributedDataParallel with a hook."""
    update: Literal["auto", "layerwise", "deferred"] = "auto"
    """``auto``: during backward where possible, after it where all gradients are needed."""
    averaging: Literal["auto", "direct", "node"] = "auto"
    """``node``: ranks of one machine sum in its memory, and one contribution per machine travels.
    ``direct``: an all-reduce over all ranks. ``auto``: node on CPUs where ranks share a machine."""
    clip_grad_norm: float | None = None
    """Clip gradients to this global norm (makes updates deferred); 0 or none: no clipping."""
    fused: bool | None = None
    """Use torch's fused kernels (True) or not (False); None keeps what the optimizer was made with.
    Fused kernels round differently from the default loop, so they are not switched on silently."""
    first_bucket_mb: float = 1.0
    """Size of the first bucket: small, to start sending early."""
    bucket_mb: float | None = None
    """Size of the other buckets, updated during backward; None: 25 (8 between CPUs with
    ``averaging="direct"``), and with large models chosen by measurement in the first steps."""
    broadcast_buffers: bool = True
    """Give every rank rank 0's buffers (BatchNorm statistics) when a step ends."""
    replan_after: int = 3
    """Lay buckets out anew when the graph has not fitted the plan for this many steps."""
    timeout: float = 600.0
    """Seconds a silent peer is waited for."""
    fence_timeout: float = 120.0
    """Seconds a subscriber may hold a bucket."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        _one_of("engine", self.engine, ("layerwise", "ddp"))
        _one_of("update", self.update, ("auto", "layerwise", "deferred"))
        _one_of("averaging", self.averaging, ("auto", "direct", "node"))
        if self.clip_grad_norm == 0:
            # What nanoGPT, Hugging Face and DeepSpeed mean by it; literally, nothing would learn.
            object.__setattr__(self, "clip_grad_norm", None)
        for name in ("first_bucket_mb", "bucket_mb", "clip_grad_norm", "timeout", "fence_timeout"):
            value = getattr(self, name)
            if name == "clip_grad_norm" and value == math.inf:
                continue  # only measure the norm
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, expected a number more than 0")
        if self.replan_after < 1:
            raise ConfigError(f"replan_after is {self.replan_after}, expected at least 1")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}")


@dataclass(slots=True)
class SyncStats:
    """Counts and times of an engine, since the run began."""

    steps: int = 0
    updates: int = 0
    early_updates: int = 0
    """Bucket updates done before the step's last gradient existed."""
    last_early_share: float = 0.0
    """The share of the last step's buckets updated before its last gradient existed."""
    plans: int = 0
    misfits: int = 0
    """Steps in which the graph did not fit the plan."""
    wait_seconds: float = 0.0
    """Time ``Run.step`` waited for averages and updates."""
    fence_seconds: dict[str, float] = field(default_factory=dict)
    """Time updates waited for holds, by owner."""

    def count_step(self, updated_at: Sequence[int], last_gradient: int) -> None:
        """A step has ended; when its buckets were updated, and when its last gradient came."""
        early = sum(at < last_gradient for at in updated_at)
        self.steps += 1
        self.early_updates += early
        self.last_early_share = early / max(len(updated_at), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an engine works on."""

    model: nn.Module
    names: list[str]
    parameters: list[nn.Parameter]
    """The trained parameters, in registration order; ``names`` goes with them."""
    views: Views
    mode: UpdateMode
    scaler: GradScaler | None
    group: Group
    averaging: Averaging
    tuner: Tuner
    events: EventBus
    trace: Tracer
    settings: SyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step came to."""

    skipped: bool = False
    grad_norm: float | None = None


class Synchroniser(Protocol):
    """Averages gradients over the group, updates weights, announces updates.

    Contract: every rank sends the same collectives in the same order in every step; a step ends
    with ``finish``, after which all replicas are equal; a peer's failure is raised, not waited out.
    """

    model: nn.Module
    """What the training loop calls: the user's model, or a wrapper of it."""
    stats: SyncStats
    accumulating: bool
    """While True, backward only adds to the local gradients."""

    @property
    def begun(self) -> bool:
        """Whether weights may be ahead of the last step that ended: a backward came since then."""
        ...

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names by bucket; empty before the first backward."""
        ...

    def attach(self) -> None:
        """Install hooks."""
        ...

    def wait(self) -> None:
        """Wait until this step's gradients are averaged (and, if layer-wise, applied)."""
        ...

    def finish(self) -> StepOutcome:
        """End the step: everything averaged, everything updated, gradients cleared."""
        ...

    def generation(self, name: str) -> int:
        """How often a parameter was updated."""
        ...

    def resume_at(self, step: int) -> None:
        """Call the next step ``step``."""
        ...

    def close(self) -> None:
        """Remove hooks and end threads."""
        ...
