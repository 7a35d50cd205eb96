"""All ranks save the same steps, whatever each of them measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.checkpoint.schedule import Schedule


class Store(dict[str, str]):
    def set(self, key: str, text: str) -> None:
        assert key not in self
        self[key] = text

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]  # KeyError: asked before rank 0 can have said it


def group(rank: int, world: int, store: Store) -> Any:
    return SimpleNamespace(rank=rank, world=world, store=store)


def saved_steps(world: int, every: int, costs: dict[int, int], until: int, start: int = 0) -> list:
    """Runs the ranks' schedules step by step, rank 0 last: the worst order there can be."""
    store = Store()
    ranks = [Schedule(group(r, world, store), every, "k", stretches=True) for r in range(world)]
    found: list[list[int]] = [[] for _ in ranks]
    for schedule in ranks:
        schedule.start(start)
    # Another rank may have ended a step before rank 0 has, but not the step behind it.
    for step in range(start + 1, until + 1):
        for rank in reversed(range(world)):
            schedule = ranks[rank]
            if schedule.due == step:
                found[rank].append(step)
                schedule.saved(step, at_least=costs.get(step, 1) if rank == 0 else 99)
    return found


@pytest.mark.parametrize("every", [1, 2, 5])
def test_ranks_agree_also_when_rank_0_stretches(every: int) -> None:
    costs = {every * 2: every * 3, every * 7: every + 1}
    for steps in (found := saved_steps(3, every, costs, every * 20)):
        assert steps == found[0]
    assert found[0][:4] == [every, every * 2, every * 3, every * 6]
    assert all(step % every == 0 for step in found[0])


def test_without_a_reason_every_multiple_is_saved() -> None:
    assert saved_steps(2, 3, {}, 14, start=4)[1] == [6, 9, 12]


def test_only_by_hand() -> None:
    schedule = Schedule(group(0, 1, Store()), None, "k", stretches=True)
    schedule.start(0)
    schedule.saved(3)
    assert schedule.due is None
