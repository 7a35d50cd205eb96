"""Bringing back the newest state of the current branch that is whole, on any number of ranks.

Nothing of the run is touched before every rank has read, verified and accepted all it needs: a
damaged range on one rank makes all of them try another copy, another tier, or an older checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sapwood.checkpoint.branches import Attempt, Branch, Branches
from sapwood.checkpoint.inventory import Candidate, Inventory, take_inventory
from sapwood.checkpoint.reading import Accept, Reading, ReadState
from sapwood.errors import CheckpointError
from sapwood.runtime.group import Group
from sapwood.state.apply import GivenState
from sapwood.state.packed import unpack
from sapwood.tiers.base import Tier
from sapwood.tiers.record import CheckpointId, Lineage
from sapwood.tiers.spec import SHARED

__all__ = ["Loaded", "Restored", "Wanted", "load_newest"]

log = logging.getLogger(__name__)
Wanted = int | CheckpointId | None
"""A step, a checkpoint, or the newest."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run was brought back to."""

    id: CheckpointId
    """The checkpoint that was read."""
    world: int
    """The number of ranks that saved it."""
    tiers: tuple[str, ...]
    """Where the shards came from."""
    skipped: tuple[str, ...]
    """What was passed over on the way here, and why."""

    @property
    def step(self) -> int:
        """The steps that had ended; the next one is ``step + 1``, as ``run.step_count`` says."""
        return self.id.step


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in the memory of this rank, verified."""

    about: Restored
    state: GivenState
    lineage: Lineage | None
    """Of the attempt that saved it."""
    branches: Branches
    """Every attempt there is."""


@dataclass(frozen=True)
class _Choice:
    """The checkpoints to try, in this order."""

    branch: Branch
    candidates: list[Candidate]
    others: list[Candidate]
    """What else there is: of abandoned branches, and of other trainings."""


def load_newest(
    group: Group,
    tiers: Sequence[Tier],
    *,
    wanted: Wanted = None,
    own: Attempt | None = None,
    files: Collection[str] = (),
    accept: Accept = lambda catalog, common: None,
) -> Loaded | None:
    """Read the newest whole checkpoint of the current branch; None if there is none at all.

    Args:
        group: all ranks take part.
        tiers: cheapest first, the same kinds in the same order on every rank.
        wanted: only this step or checkpoint, of whichever branch has it.
        own: the attempt of the training that asks.
        files: only these, such as ``("model",)``; all if empty.
        accept: raises unless this rank's run can take the state; asked before bytes are read.

    Raises:
        CheckpointError: there are checkpoints, but none is whole, or only on an abandoned branch,
            or the run cannot take it; the message says why.
    """
    inventory = take_inventory(group, tiers)
    skipped = list(inventory.notes)
    choice = _choose(inventory, tiers, wanted, own)
    for candidate in choice.candidates:
        if candidate.missing:
            skipped.append(f"{candidate.id}: no tier has the shards of ranks {candidate.missing}")
            continue
        if candidate.id not in choice.branch:
            skipped.append(_elsewhere(candidate, choice.branch))
        elif wanted is None:
            _see_through(candidate, inventory, choice.branch)
        reading = Reading(group, tiers, candidate, files=files, accept=accept, skipped=skipped)
        found = reading.load()
        if found is not None:
            return _loaded(group, candidate, inventory, found, skipped)
    _complain(inventory, choice, tiers, wanted, skipped)
    return None


def _choose(
    inventory: Inventory, tiers: Sequence[Tier], wanted: Wanted, own: Attempt | None
) -> _Choice:
    branch = inventory.branches.current(own)
    mine = [c for c in inventory.candidates if c.id in branch]
    mine.sort(key=lambda c: branch.age(c.id, c.created))
    others = [c for c in inventory.candidates if c.id not in branch]
    if isinstance(wanted, CheckpointId):
        return _Choice(branch, [c for c in inventory.candidates if c.id == wanted], [])
    if wanted is None:
        return _Choice(branch, mine, others)
    mine = [c for c in mine if c.id.step == wanted]
    others = [c for c in others if c.id.step == wanted]
    spoilt = [id for id in inventory.damaged if id in branch or id in inventory.unknown]
    if any(not _never_whole(c, tiers) for c in mine) or any(id.step == wanted for id in spoilt):
        # A damaged one is not replaced by that of another branch: it is another state.
        return _Choice(branch, mine, others)
    others.sort(key=lambda c: _kinship(c, branch), reverse=True)
    return _Choice(branch, [*mine, *others], [])


def _see_through(candidate: Candidate, inventory: Inventory, branch: Branch) -> None:
    """See that no attempt of which nothing can be read may be a later one that went back.

    Raises:
        CheckpointError: there is one that had come to no later step than this candidate's.
    """
    later = [
        id
        for id in inventory.unknown
        if id.attempt not in branch.limits and id.step <= candidate.id.step
    ]
    if later:
        raise CheckpointError(
            f"{', '.join(map(str, later[:_SHOWN]))} cannot be read, so it is not known whether "
            "training went back and that is the current branch; remove it, or say which checkpoint "
            f'to take, such as restore("{candidate.id}"): ' + "; ".join(inventory.notes)
        )


def _kinship(candidate: Candidate, branch: Branch) -> tuple[bool, float]:
    """How near a checkpoint is to a branch: of the same training first, then the latest."""
    lineage = candidate.lineage
    began = candidate.created if lineage is None else lineage.began
    return branch.is_related(lineage), began


def _elsewhere(candidate: Candidate, branch: Branch) -> str:
    kind = "an abandoned branch" if branch.is_related(candidate.lineage) else "another training"
    return f"{candidate.id} is of {kind}; {branch}"


def _loaded(
    group: Group,
    candidate: Candidate,
    inventory: Inventory,
    found: ReadState,
    skipped: list[str],
) -> Loaded:
    first, mine = found.records[0], found.records.get(group.rank)
    about = Restored(
        id=candidate.id, world=candidate.world, tiers=found.tiers, skipped=tuple(skipped)
    )
    state = GivenState(
        catalog=first.catalog,
        tensors=found.tensors,
        common=unpack(first.extras, found.regions.get(0, b"")),
        mine={} if mine is None else unpack(mine.extras, found.regions.get(mine.rank, b"")),
    )
    return Loaded(about=about, state=state, lineage=first.lineage, branches=inventory.branches)


# -- when there is nothing to restore --------------------------------------------------------


def _complain(
    inventory: Inventory,
    choice: _Choice,
    tiers: Sequence[Tier],
    wanted: Wanted,
    skipped: list[str],
) -> None:
    # To begin anew where something was is the user's decision, not ours; where a first save was
    # interrupted, nothing was.
    lost = [c for c in choice.candidates if not _never_whole(c, tiers)]
    elsewhere = [c.id for c in choice.others if not c.missing]
    asked = wanted is not None and bool(inventory.candidates)
    if not (lost or inventory.damaged or asked or elsewhere):
        for note in skipped:
            log.warning("while looking for checkpoints: %s", note)
        return
    what = f"step {wanted}" if isinstance(wanted, int) else f"checkpoint {wanted}"
    what = "no checkpoint is whole" if wanted is None else f"{what} cannot be restored"
    if elsewhere:
        what = f"{what} on the current branch"
        skipped = [*skipped, _instead(elsewhere, choice.branch)]
    why = "; ".join(skipped or ["it is not there"])
    raise CheckpointError(f"{what} (steps found: {inventory.steps}): {why}")


def _instead(elsewhere: list[CheckpointId], branch: Branch) -> str:
    """Which checkpoints of other branches there are, and how to take one."""
    shown = ", ".join(str(id) for id in elsewhere[:_SHOWN])
    more = f" and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
    return (
        f"{branch}; of other branches or trainings there are {shown}{more}: to go on from one, "
        f'say so with restore("{elsewhere[0]}")'
    )


def _never_whole(candidate: Candidate, tiers: Sequence[Tier]) -> bool:
    """Whether it lacks shards that would be seen, had they ever been safe anywhere."""
    return bool(candidate.missing) and {tier.name for tier in tiers} <= {"memory", *SHARED}
