"""A rank that dies, stops, raises or leaves is told to all others, and nobody hangs."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest
import torch

from sapwood.errors import PeerFailed
from sapwood.runtime.group import Group
from sapwood.testing import ranks

CPU = torch.device("cpu")
BOUND = 60.0
Told = tuple[str, int | None, float]


def told_while_waiting(group: Group) -> Told:
    """What this rank hears when it waits for the others, from whom, and after how long."""
    start = time.monotonic()
    try:
        for _ in range(100):
            group.all_reduce(torch.ones(1000), "averaging").wait()
    except PeerFailed as error:
        return str(error), error.rank, time.monotonic() - start
    raise AssertionError("the collective went through")


def lose(rank: int, timeout: float) -> Told:
    group = Group.join(CPU, timeout=timeout)
    try:
        ranks.mark("joined")
        if group.rank == rank:
            time.sleep(BOUND)
        return told_while_waiting(group)
    finally:
        group.close()


def wait_until_joined(group: ranks.Group) -> None:
    # One rank can be through with joining while another, still at it, would fail there instead.
    for rank in range(group.world):
        group.wait_mark("joined", rank=rank)


@pytest.mark.parametrize(("store", "victim"), [("parent", 2), ("rank0", 0)])
def test_a_killed_rank_is_told_to_all_others(store: Any, victim: int) -> None:
    with ranks.start(lose, 3, victim, 30.0, store=store) as group:
        wait_until_joined(group)
        group.kill(victim, signal.SIGKILL)
        outcomes = group.wait(BOUND)
    assert outcomes[victim].signal == signal.SIGKILL
    survivors = [one for one in outcomes if one.rank != victim]
    for one in survivors:
        assert one.ok, one.describe()
        text, blamed, seconds = one.value
        assert "while averaging" in text
        assert "died or was killed" in text or "store is gone" in text
        assert blamed is None, "a survivor is not to blame"
        assert seconds < 29, "found out, not waited out"


@pytest.mark.parametrize(("store", "victim"), [("parent", 1), ("rank0", 0)])
def test_a_stopped_rank_is_told_after_the_timeout_and_not_before(store: Any, victim: int) -> None:
    timeout = 3.0
    with ranks.start(lose, 3, victim, timeout, store=store) as group:
        wait_until_joined(group)
        group.kill(victim, signal.SIGSTOP)
        outcomes = group.wait(BOUND, ranks={0, 1, 2} - {victim})
    for one in outcomes:
        assert one.ok, one.describe()
        text, blamed, seconds = one.value
        assert "another rank has not answered for 3 s" in text
        assert "raise timeout=" in text
        assert blamed is None
        assert seconds > timeout * 0.5


def fail_or_listen(rank: int) -> Told | None:
    group = Group.join(CPU, timeout=45)
    try:
        if group.rank != rank:
            return told_while_waiting(group)
        error = ZeroDivisionError("by nought")
        sys.excepthook(type(error), error, None)
        return None
    finally:
        group.close()


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_the_words_of_a_failing_rank_reach_the_others(store: Any) -> None:
    # Rank 0, which may host the store, ends as soon as it has failed.
    answers = ranks.spawn(fail_or_listen, 3, 0, store=store, timeout=BOUND)
    for text, blamed, seconds in answers[1:]:
        assert text == "while averaging: rank 0 failed: ZeroDivisionError: by nought"
        assert blamed == 0
        assert seconds < 30


def leave_early() -> Told | None:
    group = Group.join(CPU, timeout=45)
    group.step = 3
    try:
        if group.rank == 1:
            group.leave(3)
            ranks.mark("left")
            time.sleep(2.5)
            group.check_same("plan", ["a"])
            return None
        # Long enough to look at the board: who did all of step 3 is not missed in it.
        group.check_same("plan", ["a"])
        group.step = 4
        return told_while_waiting(group)
    finally:
        group.close()


def test_who_left_is_missed_in_later_steps_only() -> None:
    (text, blamed, _), nothing = ranks.spawn(leave_early, 2, timeout=BOUND)
    assert "rank 1 left the run after 3 steps" in text
    assert blamed == 1
    assert nothing is None


def differ_in_calls() -> str:
    group = Group.join(CPU, timeout=2)
    try:
        if group.rank == 0:
            time.sleep(4)
            return ""
        group.share_text("id", "x")
    except PeerFailed as error:
        return str(error)
    finally:
        group.close()
    return "no error"


def test_a_rank_that_never_comes_is_told_by_name_of_what_was_waited_for() -> None:
    answers = ranks.spawn(differ_in_calls, 2, timeout=BOUND)
    assert "not answered for 2 s while waiting for rank 0's id" in answers[1]
