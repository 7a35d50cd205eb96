"""Real ranks: what they are given, what comes back, and that nothing of them ever stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sapwood.errors import ConfigError, LaunchError, RankError, UsageError
from sapwood.testing import _proc, ranks
from sapwood.testing.outcome import failure

LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]


def scaled(factor: int, offset: int = 0) -> int:
    return factor * ranks.rank() + offset


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def surroundings() -> tuple[str, int]:
    return str(Path.cwd()), torch.get_num_threads()


def summed() -> torch.Tensor:
    tensor = torch.full((3,), float(ranks.rank() + 1))
    dist.all_reduce(tensor)
    return tensor


def die(how: str) -> None:
    if ranks.rank() == 1:
        {"signal": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: os._exit(3)}[how]()


def stand_still(*still: int) -> int:
    ranks.mark("here")
    if ranks.rank() in still:
        threading.Event().wait(300)
    return ranks.rank()


def leave_thread() -> None:
    threading.Thread(target=outlive_main_thread, name="forgotten").start()


def outlive_main_thread() -> None:
    threading.main_thread().join(60)
    ranks.mark("main thread is over")
    threading.Event().wait(300)


def leave_child(seconds: str = "300") -> int:
    return subprocess.Popen(["sleep", seconds]).pid


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def watch_peer() -> str:
    """Rank 0 waits on rank 1 and tells how it learnt of its death."""
    dist.init_process_group("gloo")
    dist.barrier()
    ranks.mark("joined")
    if ranks.rank() == 1:
        threading.Event().wait(300)
    dist.recv(torch.zeros(1), 1)
    return "received"


def test_values_come_back_in_rank_order() -> None:
    assert ranks.spawn(scaled, 3, 10, offset=1) == [1, 11, 21]


def test_ranks_get_the_environment_of_torchrun() -> None:
    seen = ranks.spawn(environment, 2, *LAUNCHER)
    assert seen == [["0", "2", "0", "2", "127.0.0.1"], ["1", "2", "1", "2", "127.0.0.1"]]


def test_ranks_see_the_environment_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_TEST_NOW", "yes")
    assert ranks.spawn(environment, 1, "SAPWOOD_TEST_NOW") == [["yes"]]


def test_env_may_differ_by_rank() -> None:
    seen = ranks.spawn(environment, 2, "WHO", env=lambda rank: {"WHO": f"number {rank}"})
    assert seen == [["number 0"], ["number 1"]]


def test_ranks_run_here_or_where_they_are_told_with_few_threads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert ranks.spawn(surroundings, 1) == [(str(tmp_path), 1)]
    assert ranks.spawn(surroundings, 1, cwd="there", threads=2) == [(str(tmp_path / "there"), 2)]


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_ranks_meet_in_a_process_group(store: ranks.Store) -> None:
    for tensor in ranks.spawn(summed, 3, init=True, store=store):
        assert torch.equal(tensor, torch.full((3,), 6.0))


def test_a_fresh_interpreter_can_be_asked_for() -> None:
    assert ranks.spawn(scaled, 1, 1, start="spawn") == [0]


def test_a_large_result_comes_through_the_pipe() -> None:
    (value,) = ranks.spawn(bytes, 1, 3_000_000)
    assert len(value) == 3_000_000


def test_the_first_failure_is_told_first_with_its_traceback() -> None:
    with ranks.start(fail_on_signal, 3) as group:
        for rank in (2, 0, 1):
            group.wait_mark("ready", rank)
            group.kill(rank, signal.SIGUSR2)
            group.wait(30, ranks=[rank])
        error = failure(group.wait(30))
    assert error is not None
    assert error.rank == 2
    text = str(error)
    assert text.index("rank 2 raised ValueError") < text.index("rank 0 raised ValueError")
    assert text.index("rank 0 raised ValueError") < text.index("rank 1 raised ValueError")
    assert "in fail_on_signal" in text


def fail_on_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    ranks.mark("ready")
    signal.sigwait({signal.SIGUSR2})
    raise ValueError(f"told to by {ranks.rank()}")


def test_spawn_raises_what_a_rank_raised() -> None:
    with pytest.raises(RankError, match=r"(?s)1 of 2 ranks failed.*ValueError: the first") as info:
        ranks.spawn(raise_on_one, 2)
    assert info.value.rank == 1


def raise_on_one() -> None:
    if ranks.rank() == 1:
        raise ValueError("the first to fail")


def test_expect_errors_returns_outcomes() -> None:
    fine, failed = ranks.spawn(raise_on_one, 2, expect_errors=True)
    assert fine.ok
    assert (failed.ok, failed.error_type) == (False, "ValueError")
    assert failed.error.endswith("ValueError: the first to fail\n")


@pytest.mark.parametrize(
    ("how", "told"),
    [("signal", "rank 1 was killed by SIGKILL"), ("exit", "rank 1 left with exit code 3")],
)
def test_a_rank_that_dies_is_told_as_such(how: str, told: str) -> None:
    with pytest.raises(RankError, match=told):
        ranks.spawn(die, 2, how)


def test_a_crash_comes_with_its_stack() -> None:
    (outcome,) = ranks.spawn(crash, 1, expect_errors=True)
    assert outcome.signal == signal.SIGSEGV
    assert "in crash" in outcome.describe()


def test_a_value_that_cannot_be_sent_is_that_ranks_error() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 raised.*pickle"):
        ranks.spawn(threading.Lock, 1)


def test_at_the_timeout_every_stack_is_told_and_all_is_ended() -> None:
    with ranks.start(stand_still, 3, 0, 2) as group:
        group.wait(60, ranks=[1])
        group.wait_mark("here", 0)
        group.wait_mark("here", 2)
        pids = group.pids
        with pytest.raises(RankError) as info:
            group.wait(0.1)
        assert not any(running(pid) for pid in pids)
    text = str(info.value)
    assert "not done after 0.1 s: rank 0, rank 2; finished: rank 1" in text
    assert text.count("in stand_still") == 2


def test_spawn_keeps_its_timeout_however_early_it_comes() -> None:
    with pytest.raises(RankError, match=r"not done after 0.1 s: rank 0; finished: none"):
        ranks.spawn(stand_still, 1, 0, timeout=0.1)


def test_a_stopped_rank_is_told_as_stopped_and_still_gives_its_stack() -> None:
    with ranks.start(stand_still, 2, 0) as group:
        group.wait_mark("here", 0)
        group.kill(0, signal.SIGSTOP)
        assert [one.value for one in group.wait(30, ranks=[1])] == [1]
        with pytest.raises(RankError, match=r"(?s)rank 0 \(stopped by a signal\).*in stand_still"):
            group.wait(0.2)


def test_a_thread_that_keeps_a_rank_alive_is_told() -> None:
    with ranks.start(leave_thread, 1) as group:
        group.wait_mark("main thread is over", 0)
        with pytest.raises(RankError, match="its function returned, but a thread keeps"):
            group.wait(0.1)


def test_a_process_left_by_a_rank_is_told_and_ended() -> None:
    with pytest.raises(RankError, match=r"left processes running: rank 0: .*sleep 300"):
        ranks.spawn(leave_child, 1)


def test_survivors_learn_of_a_killed_rank() -> None:
    with ranks.start(watch_peer, 2) as group:
        group.wait_mark("joined", 0)
        group.wait_mark("joined", 1)
        group.kill(1)
        survivor, killed = group.wait(30)
    assert killed.signal == signal.SIGKILL
    assert survivor.error_type == "RuntimeError"
    assert "in watch_peer" in survivor.error


def test_the_store_outlives_a_killed_rank_0() -> None:
    with ranks.start(use_store_after_death, 2) as group:
        group.wait_mark("waiting", 1)
        group.kill(0)
        assert group.wait(30, ranks=[0])[0].signal == signal.SIGKILL
        group.kill(1, signal.SIGUSR2)
        assert group.wait(30)[1].value == b"kept"


def use_store_after_death() -> bytes | None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if ranks.rank() == 1:
        store.set("word", "kept")
        ranks.mark("waiting")
    signal.sigwait({signal.SIGUSR2})
    return store.get("word")


def test_leaving_the_block_ends_everything_also_on_interrupt() -> None:
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_group(pids)
    assert len(pids) == 4
    assert not any(running(pid) for pid in pids)


def interrupt_a_group(pids: list[int]) -> None:
    with ranks.start(stand_with_child, 2) as group:
        group.wait_mark("here", 0)
        group.wait_mark("here", 1)
        pids += group.pids
        pids += [one.pid for pid in group.pids for one in _proc.descendants(pid)]
        raise KeyboardInterrupt


def stand_with_child() -> None:
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    stand_still(0, 1)


def running(pid: int) -> bool:
    found = _proc.process(pid)
    return found is not None and found.state != "Z"


def test_ranks_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "starter.py"
    script.write_text(textwrap.dedent(STARTER))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        starter.kill()
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlived the process that started them"
        time.sleep(0.01)


STARTER = """
    import signal, threading
    from sapwood.testing import ranks

    def stand_still():
        ranks.mark("here")
        threading.Event().wait(300)

    if __name__ == "__main__":
        ranks._PRELOADED = ("sapwood.testing._rank",)  # less to wait for
        with ranks.start(stand_still, 2) as group:
            group.wait_mark("here", 0)
            group.wait_mark("here", 1)
            group.kill(1, signal.SIGSTOP)
            print(*group.pids, flush=True)
            group.wait(300)
"""


def test_a_mark_that_never_comes_is_an_error() -> None:
    with ranks.start(scaled, 1, 1) as group:
        with pytest.raises(RankError, match="no mark 'never': rank 0 returned 0"):
            group.wait_mark("never", 0)
        with pytest.raises(UsageError, match="it can get no signal"):
            group.kill(0)


def test_wrong_use_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="world=0"):
        ranks.spawn(scaled, 0, 1)
    with pytest.raises(ConfigError, match="store='nowhere'"):
        ranks.spawn(scaled, 1, 1, store="nowhere")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="outside a rank"):
        ranks.mark("here")
    with pytest.raises(LaunchError, match="RANK is not set"):
        ranks.rank()
