"""Which checkpoints are of the current branch, which of abandoned ones, which of other trainings.

    2-a ── 4-a ── 6-a ── 8-a           abandoned after step 4
             └─── 6-b ── 8-b           current: attempt b began last, restored from 4-a

The attempt that began last defines the current branch: its own checkpoints, and those of its
ancestors up to the step at which each was left. What an attempt has not saved cannot be seen, so a
restart that dies before its first checkpoint changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from sapwood.tiers.identity import CheckpointId, Lineage, root_of

__all__ = ["Attempt", "Branch", "Branches", "Seen"]


@dataclass(frozen=True)
class Attempt:
    """One stretch of training that was never set back, and where it came from."""

    name: str
    lineage: Lineage


@dataclass(frozen=True)
class Seen:
    """A checkpoint of which some record can be read."""

    id: CheckpointId
    created: float
    lineage: Lineage | None


class Branches:
    """The attempts behind some checkpoints, and how they descend from each other."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        """``seen``: every checkpoint of a place; several records of one do no harm."""
        self._lineages: dict[str, Lineage | None] = {}
        self._created: dict[str, float] = {}
        for one in seen:
            name = one.id.attempt
            self._lineages[name] = self._lineages.get(name) or one.lineage
            self._created[name] = min(one.created, self._created.get(name, math.inf))

    @property
    def attempts(self) -> Collection[str]:
        """The names of all attempts."""
        return self._lineages.keys()

    @cached_property
    def newest(self) -> float:
        """When the latest attempt began."""
        return max(map(self._began, self._lineages), default=-math.inf)

    def lineage(self, attempt: str) -> Lineage | None:
        """Where an attempt came from; None if it was not seen, or does not say."""
        return self._lineages.get(attempt)

    def root(self, attempt: str) -> str | None:
        """The training an attempt belongs to; None if it was not seen."""
        return root_of(self._lineages[attempt]) if attempt in self._lineages else None

    def current(self, own: Attempt | None = None) -> Branch:
        """The branch of the attempt that began last.

        ``own``: of a training that runs. Its branch is its own attempt's, once it has saved
        something; a training that was restored is never set to another training's state.
        """
        if own is not None and own.name in self._lineages:
            return self.branch(own.name)
        pool = list(self._lineages)
        if own is not None and own.lineage.ancestry:
            pool = [name for name in pool if self.root(name) == own.lineage.root]
        return self.branch(max(pool, key=lambda name: (self._began(name), name), default=None))

    def branch(self, attempt: str | None) -> Branch:
        """An attempt's checkpoints and those it descends from; None: of nothing."""
        if attempt is None:
            return Branch(None, None, {}, {})
        lineage = self._lineages.get(attempt)
        limits: dict[str, float] = {attempt: math.inf}
        order: dict[str, int] = {attempt: 0}
        for id in reversed(lineage.ancestry if lineage is not None else ()):
            # An attempt occurs once: whoever goes back within it begins another.
            limits.setdefault(id.attempt, id.step)
            order.setdefault(id.attempt, len(order))
        if root_of(lineage) == "":
            # Somewhere below lie attempts that did not record where they came from.
            first = lineage.ancestry[0].step if lineage and lineage.ancestry else math.inf
            unknown = [name for name, known in self._lineages.items() if known is None]
            last = len(order)
            for name in unknown:
                limits.setdefault(name, first)
                order.setdefault(name, last if lineage is not None else 0)
        return Branch(attempt, lineage, limits, order)

    def _began(self, attempt: str) -> float:
        lineage = self._lineages[attempt]
        return self._created[attempt] if lineage is None else lineage.began


@dataclass(frozen=True)
class Branch:
    """A line of checkpoints from a training's beginning to its latest attempt."""

    attempt: str | None
    """The latest attempt; None if there is no checkpoint at all."""
    lineage: Lineage | None
    limits: Mapping[str, float]
    """By attempt, the last step that is of this branch."""
    order: Mapping[str, int]
    """By attempt, how far back it is."""

    def __contains__(self, id: CheckpointId) -> bool:
        """Whether a checkpoint is of this branch."""
        return id.step <= self.limits.get(id.attempt, -1)

    def age(self, id: CheckpointId, created: float) -> tuple[int, int, float]:
        """A key by which the newest checkpoint of this branch comes first."""
        return -id.step, self.order[id.attempt], -created

    def is_related(self, lineage: Lineage | None) -> bool:
        """Whether an attempt is of the same training, if of another branch."""
        return self.attempt is not None and root_of(lineage) == root_of(self.lineage)

    def __str__(self) -> str:
        """As messages name it."""
        if self.attempt is None:
            return "there is no checkpoint of this training"
        parent = None if self.lineage is None else self.lineage.parent
        whence = "" if parent is None else f", restored from {parent}"
        return f"the current branch is that of attempt {self.attempt}{whence}"
