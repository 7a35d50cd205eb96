"""Which checkpoints to keep: small functions that can be combined.

    keep = any_of(last(3), every(1000), best(1, "loss", lower=True))

A policy gets all checkpoints that are safe, oldest first, and returns those to keep. What it does
not return is removed, but never before a newer checkpoint is durable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sapwood.errors import ConfigError
from sapwood.tiers.record import CheckpointId

__all__ = ["Policy", "Saved", "any_of", "best", "every", "last", "spaced", "to_drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is safe."""

    id: CheckpointId
    created: float
    """Seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Policy = Callable[[Sequence[Saved]], set[CheckpointId]]


def last(n: int) -> Policy:
    """Keep the newest ``n``."""
    _at_least_one("last", n)
    return lambda saved: {s.id for s in saved[-n:]}


def every(steps: int) -> Policy:
    """Keep those at multiples of ``steps``."""
    _at_least_one("every", steps)
    return lambda saved: {s.id for s in saved if s.id.step % steps == 0}


def best(n: int, metric: str, *, lower: bool) -> Policy:
    """Keep the ``n`` with the best value of ``metric``, of those that have one."""
    _at_least_one("best", n)

    def policy(saved: Sequence[Saved]) -> set[CheckpointId]:
        rated = [s for s in saved if not math.isnan(s.metrics.get(metric, math.nan))]
        rated.sort(key=lambda s: s.metrics[metric], reverse=not lower)
        return {s.id for s in rated[:n]}

    return policy


def spaced(seconds: float) -> Policy:
    """Keep checkpoints at least ``seconds`` apart, beginning with the oldest."""
    if seconds <= 0:
        raise ConfigError(f"spaced({seconds}): expected a number of seconds more than 0")

    def policy(saved: Sequence[Saved]) -> set[CheckpointId]:
        kept: list[Saved] = []
        for one in saved:
            if not kept or one.created - kept[-1].created >= seconds:
                kept.append(one)
        return {s.id for s in kept}

    return policy


def any_of(*policies: Policy) -> Policy:
    """Keep what any of the policies keeps."""
    return lambda saved: {id for policy in policies for id in policy(saved)}


def to_drop(saved: Sequence[Saved], policy: Policy) -> list[CheckpointId]:
    """What a policy lets go, oldest first; the newest is never among them."""
    in_order = sorted(saved, key=lambda s: (s.id.step, s.created))
    kept = policy(in_order)
    return [s.id for s in in_order[:-1] if s.id not in kept]


def _at_least_one(name: str, n: int) -> None:
    if n < 1:
        raise ConfigError(f"{name}({n}): expected at least 1")
