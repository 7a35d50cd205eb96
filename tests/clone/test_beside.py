"""What a fork takes over beside tensors: of any size, and at no risk for its donors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.testing import ranks
from tests.checkpoint.stateful import Box
from tests.checkpoint.training import Training
from tests.clone.forking import failed_with, home_of, order, told_to_stop

MIB = 2**20


class Average(Box):
    """Large, other at each step, and of no use while a file says so."""

    def __init__(self, folder: Path, nbytes: int, rank: int = 0) -> None:
        super().__init__(torch.zeros(nbytes // 4, dtype=torch.int32))
        self.folder, self.rank = folder, rank

    def follow(self, step: int) -> None:
        torch.arange(len(self.value), out=self.value).add_(1000 * step + self.rank)

    def state_dict(self) -> dict[str, Any]:
        if (self.folder / f"broken-{self.rank}").exists():
            raise ZeroDivisionError("the user's own mistake")
        return super().state_dict()


def begin(folder: Path, nbytes: int) -> tuple[Training, Average, Average]:
    training = Training(folder, timeout=30)
    return training, Average(folder, nbytes), Average(folder, MIB, training.rank + 1)


def donate(folder: Path, nbytes: int) -> list[tuple[int, bool, str | None]]:
    training, shared, own = begin(folder, nbytes)
    run = training.run
    run.allow_clones(shared={"average": shared}, own={"buffer": own})
    ranks.mark("open")
    last = None
    while last is None or run.step_count < last:
        for thing in (shared, own):
            thing.follow(run.step_count + 1)
        training.step()
        time.sleep(0.005)
        if last is None and told_to_stop(run, folder):
            last = run.step_count + 2
    forks = run.forks
    training.close()
    return [(f.step, f.done, f.failure) for f in forks]


def receive(folder: Path, nbytes: int) -> tuple[int, bool]:
    training, shared, own = begin(folder, nbytes)
    run = training.run
    parent = run.forked_from
    assert parent is not None
    run.allow_clones(shared={"average": shared}, own={"buffer": own})
    found = [thing.value.clone() for thing in (shared, own)]
    for thing in (shared, own):
        thing.follow(parent.step)
    right = all(torch.equal(a, b.value) for a, b in zip(found, (shared, own), strict=True))
    training.step()
    training.close()
    return parent.step, right


def donors(folder: Path, world: int, nbytes: int) -> ranks.Group:
    return ranks.start(donate, world, folder, nbytes)


def stop(folder: Path, group: ranks.Group) -> list[list[tuple[int, bool, str | None]]]:
    (folder / "stop").touch()
    outcomes = group.wait(timeout=60)
    error = ranks.failure(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]


def test_large_state_goes_along_by_every_way_and_again(tmp_path: Path) -> None:
    nbytes = 17 * MIB  # more than any message, and than a store takes
    with donors(tmp_path, 2, nbytes) as group:
        for rank in range(2):
            group.wait_mark("open", rank=rank, timeout=60)
        home = home_of(tmp_path)
        ways: list[dict[str, str]] = [
            {"transport": "memory"},
            {"transport": "gloo"},
            {"approach": "file"},
            {"transport": "memory"},
        ]
        for number, way in enumerate(ways):
            env = order(home, **way)
            clones = ranks.spawn(receive, 2, tmp_path / str(number), nbytes, env=env)
            assert [right for _, right in clones] == [True, True], way
        seen = stop(tmp_path, group)
    for forks in seen:
        assert [done for _, done, _ in forks] == [True] * len(ways)
    assert not list(tmp_path.rglob("clones"))


@pytest.mark.parametrize("rank", [0, 2])
def test_state_that_cannot_be_taken_ends_the_fork_and_not_the_donors(
    tmp_path: Path, rank: int
) -> None:
    """``rank`` 0 is what all share; 2 is what the second rank has of its own."""
    with donors(tmp_path, 2, MIB) as group:
        for one in range(2):
            group.wait_mark("open", rank=one, timeout=60)
        env = order(home_of(tmp_path))
        (tmp_path / f"broken-{rank}").touch()
        begun = time.monotonic()
        message = failed_with(tmp_path / "clone", 2, env)
        assert "ZeroDivisionError: the user's own mistake" in message
        assert time.monotonic() - begun < 40
        (tmp_path / f"broken-{rank}").unlink()
        clones = ranks.spawn(receive, 2, tmp_path / "again", MIB, env=env)
        assert [right for _, right in clones] == [True, True]
        seen = stop(tmp_path, group)
    for forks in seen:
        assert [done for _, done, _ in forks] == [False, True]
    assert any("own mistake" in str(forks[0][2]) for forks in seen)
