"""Which optimizer and which schedulers a run has, and whether a clone's script has the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sapwood.clone.manifest import Manifest
from sapwood.errors import CloneError
from sapwood.state.catalog import Catalog
from sapwood.state.kinds import group_members, name_of, name_of_scheduler
from sapwood.state.tensors import named_parameters

__all__ = ["check_kinds"]

log = logging.getLogger(__name__)
_SHOWN = 5
_MODULES = re.compile(r"[\w<>.]+\.")


def check_kinds(
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
) -> None:
    """See that a clone's script trains with what the run trains with.

    Raises:
        CloneError: another optimizer, other groups, or other schedulers.
    """
    here = name_of(type(optimizer))
    if not _same(manifest.optimizer, here):
        raise CloneError(
            f"the run trains with {manifest.optimizer}, this script has {here}; its state would "
            "mean something else there: make the same optimizer"
        )
    _check_groups(manifest, group_members(named_parameters(model), optimizer))
    _check_schedulers(manifest.schedulers, [name_of_scheduler(one) for one in schedulers])


def _same(theirs: str, here: str) -> bool:
    """The module of a class of the script itself depends on how the script is started."""
    if "__main__." in theirs + here:
        return _MODULES.sub("", theirs) == _MODULES.sub("", here)
    return theirs == here


def _check_groups(manifest: Manifest, here: list[list[str]]) -> None:
    if len(manifest.groups) != len(here):
        raise CloneError(
            f"the optimizer has {len(here)} parameter groups, the run to be cloned "
            f"{len(manifest.groups)}; make the same groups"
        )
    entries = Catalog.from_json(manifest.catalog).entries
    theirs = {entries[n].name: group for group, some in enumerate(manifest.groups) for n in some}
    moved = [
        f"{name} is in group {number}, in the run in group {theirs[name]}"
        for number, names in enumerate(here)
        for name in names
        if theirs.get(name, number) != number
    ]
    if moved:
        more = f", and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
        raise CloneError(
            f"the optimizer's parameter groups are not the run's: {'; '.join(moved[:_SHOWN])}"
            f"{more}; make the same groups, whose options come from the run"
        )


def _check_schedulers(theirs: Sequence[str], here: Sequence[str]) -> None:
    for number, (one, other) in enumerate(zip(theirs, here, strict=False)):
        if not _same(one, other):
            raise CloneError(
                f"scheduler {number} of the run is {one}, of this script {other}, which cannot "
                "take its state over; make the same schedulers"
            )
    for name in theirs[len(here) :]:
        log.warning("the run steps %s, this script's Run has no such scheduler: it ends here", name)
