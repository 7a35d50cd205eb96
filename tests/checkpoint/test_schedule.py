"""All ranks save the same steps, whatever each of them measures."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.checkpoint.schedule import Schedule


class Store:
    """As a group's store is: reading waits until somebody has written."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, text: str) -> None:
        with self._changed:
            assert key not in self._texts
            self._texts[key] = text
            self._changed.notify_all()

    def wait(self, key: str, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: key in self._texts, timeout)

    def get(self, key: str) -> str:
        assert self.wait(key, 10), "asked before rank 0 can have said it"
        return self._texts[key]


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
    for schedule in ranks:
        schedule.close()
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


def test_steps_that_come_again_after_a_restore_are_agreed_on_anew() -> None:
    store = Store()
    ranks = [Schedule(group(r, 2, store), 2, "k", stretches=True) for r in range(2)]
    for costs, expected in (({4: 6}, [2, 4, 6, 12]), ({}, [2, 4, 6, 8, 10, 12])):
        found: list[list[int]] = [[], []]
        for schedule in ranks:
            schedule.start(0)
        for step in range(1, 13):
            for rank in (1, 0):
                if ranks[rank].due == step:
                    found[rank].append(step)
                    ranks[rank].saved(step, at_least=costs.get(step, 1) if rank == 0 else 1)
        assert found == [expected, expected]
    for schedule in ranks:
        schedule.close()


def test_only_by_hand() -> None:
    schedule = Schedule(group(0, 1, Store()), None, "k", stretches=True)
    schedule.start(0)
    schedule.saved(3)
    assert schedule.due is None
    schedule.close()
