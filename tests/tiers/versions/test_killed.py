"""Kill -9 at every step of writing, publishing and removing: nothing is ever half there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

import sapwood.store
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.outcome import failure
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin
from tests.checkpoint.killing import forked
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, shard

ORIGIN = Origin(series="here", name="model")
POINTS = ("files", "catalog", "tiers.stage", "tiers.publish")
AT_ONCE = 2
STEP = {1: 2, 2: 3} if "SAPWOOD_TEST_EVERY_MOMENT" not in os.environ else {1: 1, 2: 1}
"""Of several moments that follow each other one is enough; all of them take minutes."""
SMALL = {"large": 300, "extras": 9_000}
Tell = Callable[[str], None]


def work(place: Path, world: int, tell: Tell) -> None:
    """Two checkpoints; the first one goes when the second is there."""
    with closing(VersionTier(str(place), ORIGIN)) as tier:
        for step in (1, 2):
            for rank in range(world):
                tier.put(*shard(step, rank, world, **SMALL))
                tell(f"put {step} {rank}")
        tell("dropping")
        tier.drop(CheckpointId(1, ATTEMPT))
        tell("dropped")


def count(place: Path, world: int) -> int:
    """How many moments there are."""
    seen = []

    def counted(tell: Tell) -> None:
        for name in POINTS:
            faults.arm(name, lambda **facts: seen.append(facts), at=None)
        work(place, world, lambda text: None)
        tell(str(len(seen)))

    killed, (told,) = forked(counted)
    assert not killed
    return int(told)


def die(place: Path, world: int, at: int) -> list[str]:
    """Die at the n-th moment; what had been told before."""
    left = [at]

    def passed(**facts: object) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(tell: Tell) -> None:
        for name in POINTS:
            faults.arm(name, passed, at=None)
        work(place, world, tell)

    return forked(dying)[1]


def all_is_well(place: Path, world: int, told: list[str]) -> None:
    """What was promised is there, all of it; what was not is not there, or all of it is."""
    with closing(VersionTier(str(place), ORIGIN)) as tier:
        found = set(tier.shards())
        for text in told:
            if text.startswith("put"):
                _, step, rank = text.split()
                if step == "1" and "dropping" in told:
                    continue
                assert Stored(CheckpointId(int(step), ATTEMPT), int(rank)) in found, told
        if "dropped" in told:
            assert {stored.id.step for stored in found} == {2}
        for stored in found:
            _, memory = shard(stored.id.step, stored.rank, world, **SMALL)
            assert np.array_equal(contract.read_all(tier, stored), memory)
    if not (place / "catalog.db").exists():
        return
    with sapwood.store.open(place, create=False) as repo:
        assert repo.verify().problems == []
        for record in repo.models():
            assert {s.rank for s in found if f"step-{s.id.step}" == record.version} == set(
                range(world)
            )
            assert len(repo.load(str(record.reference))) == 4


def goes_on(place: Path, world: int) -> None:
    """The next training saves, removes, and leaves nothing behind but what is there."""
    with closing(VersionTier(str(place), ORIGIN)) as tier:
        for step in (2, 3):
            for rank in range(world):
                tier.put(*shard(step, rank, world, **SMALL))
        tier.drop(CheckpointId(1, ATTEMPT))
        tier.drop(CheckpointId(2, ATTEMPT))
        assert {stored.id.step for stored in tier.shards()} == {3}
        with closing(tier.open(Stored(CheckpointId(3, ATTEMPT), 0))) as found:
            verify(found)
    with sapwood.store.open(place) as repo:
        repo.gc(quiet=0.0)
        assert [record.version for record in repo.models()] == ["step-3"]
        assert repo.models(".*") == []
        assert repo.verify().problems == []
        known = {row.key for row in repo._backend.catalog.packs()}  # type: ignore[attr-defined]
    there = {str(p.relative_to(place)) for p in (place / "packs").rglob("*") if p.is_file()}
    assert there == known
    assert not [p for p in place.rglob("*") if "draft" in p.name and p.is_file()]


def matrix(folder: Path, world: int, part: int) -> int:
    moments = count(folder / "count", world)
    for at in range(1 + part, moments + 1, AT_ONCE * STEP[world]):
        place = folder / str(at)
        told = die(place, world, at)

        def after(tell: Tell, place: Path = place, told: list[str] = told) -> None:
            all_is_well(place, world, told)
            goes_on(place, world)

        try:
            forked(after)
        except AssertionError as error:
            raise AssertionError(f"killed at moment {at} of {moments}: {error}") from error
        shutil.rmtree(place, ignore_errors=True)
    return moments


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_every_moment(tmp_path: Path, world: int) -> None:
    with ExitStack() as stack:
        groups = []
        for part in range(AT_ONCE):
            folder = tmp_path / str(part)
            folder.mkdir()
            groups.append(stack.enter_context(ranks.start(matrix, 1, folder, world, part)))
        outcomes = [one for group in groups for one in group.wait(200)]
    error = failure(outcomes)
    assert error is None, error
    assert [one.value > 20 for one in outcomes] == [True] * AT_ONCE
