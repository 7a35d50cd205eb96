"""Points in production code do nothing until a test arms them, and then exactly what it says."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from sapwood.errors import ConfigError
from sapwood.runtime import faults as points
from sapwood.testing import _proc, faults, ranks


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    points.disarm_all()


def pass_point(times: int, name: str = "test.point") -> int:
    for step in range(times):
        points.point(name, step=step)
    return times


def pass_counting_lanes() -> list[int]:
    hit: list[int] = []
    with faults.inject("test.point", lambda step: hit.append(step), at=None):
        pass_point(3)
    return hit


def test_an_unarmed_point_does_nothing() -> None:
    pass_point(3)
    assert faults.armed() == ()


def test_raises_at_the_asked_passage_only() -> None:
    seen = []
    with faults.inject("test.point", "raise", at=2) as fault:
        for step in range(4):
            try:
                points.point("test.point", step=step)
            except faults.InjectedError as error:
                seen.append((step, str(error)))
        assert fault.seen == 4
    assert seen == [(1, "injected at test.point (step=1)")]
    assert faults.armed() == ()


def test_other_points_are_not_touched() -> None:
    with faults.inject("test.other", "raise"):
        pass_point(3)


def test_when_chooses_which_passages_count() -> None:
    hit: list[int] = []
    with faults.inject("test.point", lambda step: hit.append(step), when=lambda step: step > 4):
        pass_point(9)
    assert hit == [5]


def test_at_none_acts_every_time() -> None:
    assert pass_counting_lanes() == [0, 1, 2]


def test_two_faults_at_one_point_are_disarmed_apart() -> None:
    hit: list[str] = []
    with faults.inject("test.point", lambda step: hit.append("a"), at=None):
        with faults.inject("test.point", lambda step: hit.append("b"), at=None):
            pass_point(1)
        pass_point(1)
    assert hit == ["a", "b", "a"]


def test_inject_disarms_when_the_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), faults.inject("test.point", "raise"):
        raise ZeroDivisionError
    assert faults.armed() == ()


@pytest.mark.parametrize("action", ["explode", "sleep", "sleep:soon", "exit:", "exit:now"])
def test_an_unknown_action_is_refused_when_armed(action: str) -> None:
    with pytest.raises(ConfigError, match="is not one of raise, kill, stop"):
        points.arm("test.point", action)


def test_passages_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="counted from 1"):
        points.arm("test.point", "raise", at=0)


@pytest.mark.parametrize(
    "text", ["nothing", "a:", "a:raise@", "a:raise@x", "a:raise[", "a:raise@0"]
)
def test_a_wrong_entry_of_the_environment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=points.ENV):
        faults.env(text)


def test_reads_every_part_of_an_entry() -> None:
    one, two = points.parse(" a.b:sleep:0.5@3[bucket=2,rank=1] ; c:raise@*;")
    assert (one.name, one.at, two.name, two.at) == ("a.b", 3, "c", None)
    assert one.when is not None
    assert one.when({"bucket": 2, "rank": 1})
    assert not one.when({"bucket": 2, "rank": 0})
    assert not one.when({})


def test_the_environment_arms_one_rank() -> None:
    env = faults.env("test.point:raise@2[rank=1]")
    outcomes = ranks.spawn(pass_point, 2, 3, env=env, expect_errors=True)
    assert outcomes[0].value == 3
    assert outcomes[1].error_type == "InjectedError"
    assert "step=1" in outcomes[1].error


def test_kill_and_exit_end_the_rank() -> None:
    env = faults.env("test.point:kill@2[rank=0]", "test.point:exit:7@3[rank=1]")
    outcomes = ranks.spawn(pass_point, 3, 3, env=env, expect_errors=True)
    assert outcomes[0].signal == signal.SIGKILL
    assert outcomes[1].exit_code == 7
    assert outcomes[2].ok


def test_stop_stops_the_rank_until_it_is_continued() -> None:
    with ranks.start(mark_around_point, 1, env=faults.env("test.point:stop")) as group:
        group.wait_mark("before", 0)
        wait_until_stopped(group.pids[0])
        group.kill(0, signal.SIGCONT)
        assert group.wait(30)[0].value == "went on"


def test_sleep_goes_on_afterwards() -> None:
    with faults.inject("test.point", "sleep:0"):
        assert pass_point(2) == 2


def mark_around_point() -> str:
    ranks.mark("before")
    points.point("test.point")
    return "went on"


def wait_until_stopped(pid: int, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while (found := _proc.process(pid)) is not None and found.state != "T":
        assert time.monotonic() < deadline, "the rank did not stop"
        time.sleep(0.005)
