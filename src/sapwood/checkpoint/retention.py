"""Which checkpoints to keep: small functions that can be combined.

    keep = any_of(last(3), every(1000), best(1, "loss", lower=True))

A policy gets all checkpoints of a training that are safe, oldest first, and returns those to keep.
What it does not return is removed, but never before a newer checkpoint is durable. Checkpoints of
branches that were abandoned count as older than those of the current branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sapwood.checkpoint.branches import Branch, Branches, Seen
from sapwood.errors import ConfigError
from sapwood.tiers.identity import root_of
from sapwood.tiers.record import CheckpointId, Lineage

__all__ = ["Policy", "Saved", "any_of", "best", "every", "last", "spaced", "to_drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is safe."""

    id: CheckpointId
    created: float
    """Seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    lineage: Lineage | None = None
    """Where the attempt that saved it came from."""


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
            gap = one.created - kept[-1].created if kept else math.inf
            # A clock that was set back tells nothing of the time between; 0: it is not known.
            if gap >= seconds or (one.created and gap <= -seconds):
                kept.append(one)
        return {s.id for s in kept}

    return policy


def any_of(*policies: Policy) -> Policy:
    """Keep what any of the policies keeps."""
    return lambda saved: {id for policy in policies for id in policy(saved)}


def to_drop(
    saved: Sequence[Saved], policy: Policy, current: str | None = None
) -> list[CheckpointId]:
    """What a policy lets go, oldest first; the newest of a training is never among them.

    Trainings that share a place are judged each by itself. ``current`` is the attempt whose branch
    is the current one; without it, that of each training's latest attempt.
    """
    trainings: dict[str, list[Saved]] = {}
    for one in saved:
        trainings.setdefault(root_of(one.lineage), []).append(one)
    gone = []
    for mine in trainings.values():
        branches = Branches(Seen(s.id, s.created, s.lineage) for s in mine)
        known = current is not None and current in branches.attempts
        in_order = _by_age(mine, branches.branch(current) if known else branches.current())
        kept = policy(in_order)
        gone += [s.id for s in in_order[:-1] if s.id not in kept]
    return gone


def _by_age(saved: Sequence[Saved], branch: Branch) -> list[Saved]:
    """Oldest first; what is not of the branch is older than all of it."""
    return sorted(
        saved,
        key=lambda s: (
            s.id in branch,
            s.id.step,
            -branch.order.get(s.id.attempt, 0),
            s.created,
        ),
    )


def _at_least_one(name: str, n: int) -> None:
    if n < 1:
        raise ConfigError(f"{name}({n}): expected at least 1")
