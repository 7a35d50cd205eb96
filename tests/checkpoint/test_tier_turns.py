"""Tiers that take only every n-th checkpoint: all ranks mean the same ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import sapwood
from sapwood.checkpoint.turns import Turns
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.training import Training

TIERS = ["memory", TierSpec(kind="external", every=2)]


def published(place: Path) -> list[int]:
    return sorted(int(p.name.split("-")[0]) for p in place.iterdir() if p.name[0].isdigit())


def train(folder: Path) -> list[int]:
    """Rank 1 has no staging memory when step 3 is due; the steps this rank skipped."""
    training = Training(folder)
    with sapwood.Checkpointer(
        training.run,
        folder / "ckpts",
        tiers=TIERS,
        every=1,
        mode="sharded",
        engine="sync",
        keep=None,
        patience=0.0,
    ) as c:
        training.steps(1)
        pool, take = c._saver._pool, c._saver._pool.take
        if rank() == 1:
            pool.take = lambda: None  # type: ignore[method-assign]
        training.steps(3)
        pool.take = take  # type: ignore[method-assign]
        training.steps(7)
    training.close()
    return c.stats.skipped


def test_a_rank_that_skipped_once_stays_in_step(tmp_path: Path) -> None:
    assert ranks.spawn(train, 2, tmp_path) == [[], [3]]
    # Whole, by itself: rank 0's shard of step 3 is gone as well, nobody brings the other.
    assert published(tmp_path / "ckpts") == [1, 5, 7]
    assert not list((tmp_path / "ckpts").glob("*.partial"))


def test_what_was_due_counts_and_not_what_was_saved() -> None:
    turns = Turns([TierSpec(kind="memory"), TierSpec(kind="external", every=3)])
    found = {}
    for step in (5, 10, 10, 12, 20):
        turns.come(step)
        found[step] = turns.tiers()
    assert [len(tiers) for tiers in found.values()] == [2, 1, 1, 2]
    assert turns.tiers(everywhere=True) == ("memory", "external")
    turns.start()  # restored: step 20 is another checkpoint now
    turns.come(20)
    assert turns.tiers() == ("memory",)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_last_checkpoint_of_a_run_that_stops_goes_to_every_tier(
    tmp_path: Path, steps: int
) -> None:
    training = Training(tmp_path, stop_timeout=20)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", tiers=TIERS, every=1, mode="sharded", engine="sync"
    ) as c:
        training.steps(steps)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(sapwood.Stopped) as stopped:
            training.steps(99)
        last = stopped.value.step
        assert stopped.value.saved
        assert last in published(tmp_path / "ckpts")
        assert [save.id.step for save in c.stats.saves] == list(range(1, last + 1))
        assert set(c.stats.saves[-1].durable) == {"memory", "external"}
    training.close()
