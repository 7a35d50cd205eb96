"""Which versions are checkpoints of which training, and which one a new one comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sapwood.repository.base import Backend, ModelRecord
from sapwood.tiers.identity import CheckpointId, Lineage
from sapwood.tiers.versions.facts import Facts, Origin

__all__ = ["UNKNOWN_RUN", "Saved", "checkpoints_in", "find_saved", "model_name", "parent_of"]

UNKNOWN_RUN = "checkpoints"
"""The model of checkpoints whose records do not say which run saved them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A version that is a checkpoint."""

    record: ModelRecord
    facts: Facts


def checkpoints_in(backend: Backend, origin: Origin | None, pattern: str = "*") -> list[Saved]:
    """The versions that are checkpoints; without an ``origin`` those of every training."""
    if origin is not None and origin.name:
        pattern = origin.name
    found = []
    for record in backend.models(pattern):
        facts = Facts.of(record)
        if facts is not None and (origin is None or facts.series == origin.series):
            found.append(Saved(record, facts))
    return found


def find_saved(backend: Backend, origin: Origin, id: CheckpointId, run: str) -> Saved | None:
    """A checkpoint's version, if there is one; the run tells what its model is called."""
    known = checkpoints_in(backend, origin, origin.name or run)
    return next((one for one in known if one.facts.id == id), None)


def model_name(origin: Origin, lineage: Lineage | None) -> str:
    """What the model is called: as the user says, else as the run that saved it."""
    return origin.name or (UNKNOWN_RUN if lineage is None else lineage.run)


def parent_of(
    backend: Backend, origin: Origin, id: CheckpointId, lineage: Lineage | None
) -> ModelRecord | None:
    """The version a checkpoint comes from.

    That is the one before in its attempt; for the first one of an attempt the version it was
    restored from, or the newest before that one on its branch; and for a fork's first one that of
    its parent.
    """
    own = checkpoints_in(backend, origin, model_name(origin, lineage))
    found = _newest(own, id.attempt, id.step - 1)
    if found is not None:
        return found.record
    ancestry = () if lineage is None else lineage.ancestry
    if ancestry:  # it may be another run's, which went on in this place
        mine = checkpoints_in(backend, origin)
        for before in reversed(ancestry):
            found = _newest(mine, before.attempt, before.step)
            if found is not None:
                return found.record
    return _parent_of_fork(backend, origin.forked)


def _parent_of_fork(backend: Backend, forked: str) -> ModelRecord | None:
    run, _, step = forked.rpartition("@")
    if not run or not step.isdecimal():
        return None
    every = checkpoints_in(backend, None)
    theirs = [one for one in every if one.facts.run == run and one.facts.id.step <= int(step)]
    newest = max(theirs, key=lambda one: (one.facts.id.step, one.facts.created), default=None)
    return None if newest is None else newest.record


def _newest(known: Sequence[Saved], attempt: str, step: int) -> Saved | None:
    """The last checkpoint of an attempt up to a step."""
    fitting: Iterable[Saved] = (
        one for one in known if one.facts.id.attempt == attempt and one.facts.id.step <= step
    )
    return max(fitting, key=lambda one: one.facts.id.step, default=None)
