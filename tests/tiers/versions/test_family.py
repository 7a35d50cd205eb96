"""Which version a checkpoint comes from, where retention was quicker."""

from __future__ import annotations

import pytest
import torch

import sapwood.store
from sapwood.tiers.identity import CheckpointId
from sapwood.tiers.versions.facts import Facts, Origin
from sapwood.tiers.versions.family import parent_of


def _save(repo: sapwood.store.Repository, step: int, parent: str | None) -> None:
    facts = Facts(
        id=CheckpointId(step, "aaaaaa"), run="run", series="s", world=1, created=step, index=0
    )
    repo.save(
        {"w": torch.full((3,), step)}, f"run@step-{step}", parent=parent, note=dict(facts.note())
    )


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((1, 2, 3, 4, 5, 6), "step-4"),
        ((5, 6), "step-4"),
        ((1, 5, 6), "step-4"),  # as by a tag: not what the fork comes from
        ((6,), "step-4"),
        ((1, 2, 3), "step-3"),  # nothing is left that would know of later ones
        ((), None),
    ],
)
def test_a_fork_comes_from_what_was_removed_meanwhile(
    kept: tuple[int, ...], expected: str | None
) -> None:
    with sapwood.store.open("memory:") as repo:
        for step in range(1, 7):
            _save(repo, step, f"run@step-{step - 1}" if step > 1 else None)
        for step in set(range(1, 7)) - set(kept):
            repo.remove(f"run@step-{step}")
        fork = Origin(series="forks", name="", forked="run@4")
        found = parent_of(repo._backend, fork, CheckpointId(5, "bbbbbb"), None)
        assert (None if found is None else found.version) == expected
        assert found is None or (found.removed is None) == (int(found.version[5:]) in kept)
