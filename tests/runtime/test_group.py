"""A group of real ranks: agreeing, sharing, reducing, one after the other, and the user's own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sapwood.errors import LaunchError, MismatchError
from sapwood.runtime.group import Group, Pending
from sapwood.testing import ranks

CPU = torch.device("cpu")
BOTH_STORES = pytest.mark.parametrize("store", ["parent", "rank0"])

# What each rank passes to check_same, and what every rank must then read.
AGREEMENTS: list[tuple[list[list[str]], str | None]] = [
    ([["a", "b"]] * 4, None),
    ([["a", "b"], ["a", "b"], ["a", "c"], ["a", "b"]], "rank 0 has [b], rank 2 has [c]"),
    ([["a", "b"], ["a", "b"], ["a"], ["a", "b"]], "rank 0 has [b], rank 2 has nothing more"),
    ([["a"], ["a", "b"], ["a"], ["a"]], "rank 0 has nothing more, rank 1 has [b]"),
    (
        [["a"], ["x"], ["a"], ["y"]],
        "rank 0 and 2 ranks do not have the same model. First difference: rank 0",
    ),
    ([["a", "b"], ["a\nb"], ["a", "b"], ["a", "b"]], "rank 0 has [a], rank 1 has [a\nb]"),
    ([[], ["nothing more"], [], []], "rank 0 has nothing more, rank 1 has [nothing more]"),
    ([["é"] * 3] * 4, None),
]


def agree() -> dict[str, Any]:
    group = Group.join(CPU, timeout=30)
    told = []
    for lines, _ in AGREEMENTS:
        try:
            group.check_same("model", lines[group.rank])
            told.append(None)
        except MismatchError as error:
            told.append(str(error))
    shared = [group.share_text("id", f"{n} from {group.rank}") for n in range(3)]
    total, low = torch.tensor([group.rank + 1.0]), torch.tensor([group.rank + 1.0])
    given = torch.full((3,), float(group.rank + 7))
    pending = [
        group.all_reduce(total, "adding"),
        group.all_reduce(low, "finding the least", dist.ReduceOp.MIN),
        group.broadcast(given, "giving"),
    ]
    for one in pending:
        one.wait()
    group.leave(0)
    group.close()
    group.close()
    values = (total.item(), low.item(), given.tolist())
    return {"told": told, "shared": shared, "values": values, "left": dist.is_initialized()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_agree_share_and_reduce(world: int) -> None:
    answers = ranks.spawn(agree, world)
    for number, (lines, expected) in enumerate(AGREEMENTS):
        told = {one["told"][number] for one in answers}
        assert len(told) == 1, "every rank must be told the same"
        if all(one == lines[0] for one in lines[:world]):
            assert told == {None}
        elif world == 4:
            assert expected is not None
            assert expected in told.pop()
        else:
            assert "do not have the same model. First difference: rank 0 has" in told.pop()
    for one in answers:
        assert one["shared"] == ["0 from 0", "1 from 0", "2 from 0"]
        assert one["values"] == (world * (world + 1) / 2, 1.0, [7.0] * 3)
        assert one["left"] is False


def test_a_group_of_one_needs_no_process_group() -> None:
    group = Group.join(CPU, timeout=5)
    try:
        value = torch.tensor([2.0])
        group.all_reduce(value, "adding").wait()
        group.broadcast(value, "giving").wait()
        group.check_same("model", ["a"])
        assert group.share_text("id", "mine") == "mine"
        assert value.item() == 2.0
        assert (group.rank, group.world) == (0, 1)
        assert not dist.is_initialized()
        group.leave(3)
    finally:
        group.close()


def join_again_and_again() -> list[float]:
    sums = []
    for turn in range(3):
        group = Group.join(CPU, timeout=30)
        assert group.share_text("turn", str(turn)) == str(turn)
        value = torch.tensor([float(group.rank + turn)])
        group.all_reduce(value, "adding").wait()
        sums.append(value.item())
        group.leave(0)
        # Uneven on purpose: one rank is in the next group before the other has left this one.
        if group.rank == turn % 2:
            time.sleep(0.2)
        group.close()
    return sums


@BOTH_STORES
def test_groups_one_after_the_other(store: Any) -> None:
    assert ranks.spawn(join_again_and_again, 2, store=store) == [[1.0, 3.0, 5.0]] * 2


def use_the_users_own(place: str | None) -> tuple[float, float, bool, str]:
    if place is None:
        dist.init_process_group("gloo")
    else:
        # Nothing the launcher says is needed, or complete.
        rank, world = ranks.rank(), ranks.world()
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    group = Group.join(CPU, timeout=30)
    ours, theirs = torch.ones(1), torch.ones(1)
    pending = group.all_reduce(ours, "adding")
    dist.all_reduce(theirs)
    pending.wait()
    group.check_same("model", ["a"])
    group.leave(0)
    group.close()
    alive = dist.is_initialized()
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return ours.item(), theirs.item(), alive, group.launch.launcher


def test_a_process_group_of_the_user_is_used_and_kept(tmp_path: Path) -> None:
    assert ranks.spawn(use_the_users_own, 2, None) == [(2.0, 4.0, True, "torchrun")] * 2
    place = f"file://{tmp_path}/meeting"
    assert ranks.spawn(use_the_users_own, 2, place) == [(2.0, 4.0, True, "none")] * 2


class LateWork:
    """Work that ends well after the poll gave up and before anybody asked."""

    def __init__(self) -> None:
        self.polls = 0

    def wait(self, timeout: timedelta) -> None:
        self.polls += 1
        if self.polls == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.polls > 0


def test_work_that_ends_just_after_a_poll_is_no_failure() -> None:
    group = Group.join(CPU, timeout=5)
    try:
        Pending(group, LateWork(), "adding").wait()  # type: ignore[arg-type]
    finally:
        group.close()


def test_a_closed_group_says_so() -> None:
    group = Group.join(CPU, timeout=5)
    group.close()
    with pytest.raises(RuntimeError, match="the group is closed"):
        group.store.set("a", "b")


def test_join_names_a_meeting_point_nobody_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 cannot reach .* 127\.0\.0\.1:9"):
        Group.join(CPU, timeout=1)
