"""A run that is asked to stop ends the same step on all ranks, saves it, and can go on from it."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sapwood
from sapwood.checkpoint.checkpointer import Checkpointer
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.runtime import clock
from sapwood.runtime.clock import process_age, slurm_seconds_left
from sapwood.testing import ranks
from sapwood.testing.faults import env
from sapwood.testing.ranks import rank
from tests.checkpoint.engines import see_end
from tests.checkpoint.training import Training, batch, same

ENV = {"SAPWOOD_NODE": "n0"}
WORLD = 2
MORE = 3
Found = dict[str, Any]


def signal_me(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def listening() -> Iterator[list[str]]:
    """What is logged as a warning or worse."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("sapwood").addHandler(ear)
    try:
        yield heard
    finally:
        logging.getLogger("sapwood").removeHandler(ear)


def train(training: Training, inside: Callable[[int], None], until: int = 2000) -> list[float]:
    """Steps to a step; ``inside`` is called in the middle of each."""
    losses = []
    while training.run.step_count < until:
        step = training.run.step_count + 1
        x, y = batch(training.run.step_count, training.rank)
        loss = F.cross_entropy(training.run.model(x), y)
        loss.backward()
        inside(step)
        losses.append(float(loss.detach()))
        training.run.step()
        # Fast steps would be a thousand before the other rank hears of a signal.
        time.sleep(0.01)
    return losses


def found(training: Training, stopped: sapwood.Stopped, heard: list[str]) -> Found:
    status = json.loads((training.run.folder / "status.json").read_text())
    return {"step": stopped.step, "saved": stopped.saved, "reason": stopped.reason,
            "code": stopped.code, "heard": heard, "status": status}  # fmt: skip


# -- signals -----------------------------------------------------------------------------------

NUMBERS = {"usr1": signal.SIGUSR1}
CASES = {
    # In which step, and where in it, which rank gets a signal.
    "one rank in mid-step": {(1, 4): "inside"},
    "rank 0 between steps": {(0, 4): "between"},
    "all ranks at different times": {(0, 5): "inside", (1, 3): "between"},
    "before the first step": {(1, 0): "run"},
    "between run and checkpointer, usr1": {(0, 0): "usr1"},
    "while another rank reads data": {(1, 4): "inside", (0, 4): "slow", (0, 5): "slow"},
}


def stop(folder: Path, plan: dict[tuple[int, int], str]) -> Found:
    def at(step: int, where: str) -> None:
        what = plan.get((rank(), step))
        if what == "slow" and where == "inside":
            time.sleep(1.0)
        elif what == where or (what in NUMBERS and where == "run"):
            signal_me(NUMBERS.get(what, signal.SIGTERM))

    with listening() as heard:
        training = Training(folder, timeout=30, stop_timeout=25)
        at(0, "run")
        with Checkpointer(training.run, folder / "ckpts") as c:
            assert c.restore_latest() is None
            stopped = None
            try:
                for until in range(1, 2000):
                    train(training, lambda step: at(step, "inside"), until)
                    at(until, "between")
            except sapwood.Stopped as error:
                stopped = error
                with pytest.raises(sapwood.Stopped):
                    training.run.step()
        assert stopped is not None
        assert training.run.stopping
        training.close()
    return found(training, stopped, heard)


def go_on(folder: Path, stopped_at: int) -> None:
    """Restore, train on, and compare with a training that was never stopped."""
    until = stopped_at + MORE
    plain = Training(folder / "plain")
    losses = plain.steps(until)
    expected = plain.state()
    plain.close()
    training = Training(folder)
    torch.manual_seed(9)  # whatever it was, it must come back
    with Checkpointer(training.run, folder / "ckpts") as c:
        restored = c.restore_latest()
        assert restored is not None
        assert restored.id.step == stopped_at
        assert training.steps(until) == losses[stopped_at:]
        assert same(training.state(), expected)
    training.close()


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_at_the_same_step_and_go_on_from_it(tmp_path: Path, case: str) -> None:
    results = ranks.spawn(stop, WORLD, tmp_path, CASES[case], env=ENV)
    steps = {one["step"] for one in results}
    assert len(steps) == 1
    (step,) = steps
    assert step >= min(number for _, number in CASES[case])
    for one in results:
        assert (one["saved"], one["code"]) == (True, 75)
        assert one["reason"].startswith("SIGUSR1" if "usr1" in case else "SIGTERM")
        assert one["status"]["state"] == "stopped"
        assert one["status"]["step"] == step
    assert results[0]["heard"] == [
        f"stopping after step {step}, saving first ({results[0]['reason']})"
    ]
    assert results[1]["heard"] == []
    ranks.spawn(go_on, WORLD, tmp_path, step, env=ENV)


def never_mind(folder: Path) -> None:
    """As most scripts are: nothing is caught, nothing is closed."""
    training = Training(folder, timeout=30)
    train(training, lambda step: signal_me() if (rank(), step) == (1, 2) else None)


def test_a_script_that_knows_nothing_of_it_ends_with_the_code_for_again(tmp_path: Path) -> None:
    outcomes = ranks.spawn(never_mind, WORLD, tmp_path, expect_errors=True)
    assert [one.exit_code for one in outcomes] == [75, 75]
    (status,) = (tmp_path / "runs").glob("*/status.json")
    told = json.loads(status.read_text())
    assert told["state"] == "stopped"
    assert told["detail"].endswith("(not saved): SIGTERM to rank 1")


def last_step(folder: Path) -> None:
    """The signal comes when one rank has ended its loop already: nothing is left to stop."""
    training = Training(folder, timeout=30)
    training.steps(3)
    if rank() == 0:
        signal_me()
    training.close()


def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    ranks.spawn(last_step, WORLD, tmp_path)
    (status,) = (tmp_path / "runs").glob("*/status.json")
    assert json.loads(status.read_text())["state"] == "ended"


def fail_or_linger(folder: Path) -> None:
    with Training(folder, timeout=30).run as run:
        ranks.mark("ready")
        if rank() == 1:
            raise RuntimeError("boom")
        assert run.rank == 0
        time.sleep(600)  # a long evaluation


def test_a_rank_whose_group_failed_ends_by_the_signal(tmp_path: Path) -> None:
    """As launchers do it: one rank failed, and the others are told to end."""
    with ranks.start(fail_or_linger, WORLD, tmp_path) as group:
        group.wait_mark("ready", 0)
        group.wait(30, ranks=[1])
        group.kill(0, signal.SIGTERM)
        outcomes = group.wait(30)
    assert outcomes[0].signal == signal.SIGTERM
    assert outcomes[1].error_type == "RuntimeError"


# -- one rank ----------------------------------------------------------------------------------


def stop_alone(folder: Path, at: int, timeout: float, wait: int, **options: Any) -> Found:
    with listening() as heard:
        training = Training(folder, stop_timeout=timeout)
        c = Checkpointer(training.run, folder / "ckpts", **options)
        assert isinstance(c._engine, NodeEngine)
        (folder / "engine").write_text(str(c._engine.pid))
        c.restore_latest()

        def inside(step: int) -> None:
            if step == wait + 1:
                c.wait()
            if step == at:
                # Twice: a batch system tells all processes, and a launcher passes it on.
                signal_me()
                signal_me()

        try:
            train(training, inside, at + 5)
            raise AssertionError("not stopped")
        except sapwood.Stopped as error:
            stopped = error
        began = time.monotonic()
        c.close()
        training.close()
        assert time.monotonic() - began < 20
    return found(training, stopped, heard)


def test_no_checkpointer_is_said(tmp_path: Path) -> None:
    outcomes = ranks.spawn(plainly, 1, tmp_path)
    assert outcomes == [["stopping after step 1, without saving: the run has no Checkpointer "
                         "(SIGTERM to rank 0)"]]  # fmt: skip


def plainly(folder: Path) -> list[str]:
    training = Training(folder)
    with listening() as heard, pytest.raises(sapwood.Stopped):
        train(training, lambda step: signal_me())
    training.close()
    return heard


def test_a_stop_while_checkpoints_are_under_way_waits_for_its_own(tmp_path: Path) -> None:
    slow = env("engine.put:sleep:0.3@*[tier=external]")
    options = {"every": 1, "mode": "lazy", "patience": 0.05}
    (one,) = ranks.spawn(stop_alone, 1, tmp_path, 6, 30.0, 99, **options, env={**ENV, **slow})
    assert (one["step"], one["saved"]) == (6, True)
    ranks.spawn(go_on, 1, tmp_path, 6, env=ENV)


def test_a_tier_too_slow_costs_the_last_checkpoint_only(tmp_path: Path) -> None:
    slow = env("engine.put:sleep:60@*[tier=external,step=5]")
    options = {"every": 2, "mode": "lazy"}
    (one,) = ranks.spawn(stop_alone, 1, tmp_path, 5, 1.0, 4, **options, env={**ENV, **slow})
    assert (one["step"], one["saved"], one["code"]) == (5, False, 75)
    said = "\n".join(one["heard"])
    assert "the run stops before step 5 is durable in external" in said
    assert "raise stop_timeout=" in said
    assert "a restart goes on from the checkpoint before it" in said
    engine = int((tmp_path / "engine").read_text())
    os.kill(engine, signal.SIGKILL)
    see_end(engine)
    ranks.spawn(go_on, 1, tmp_path, 4, env=ENV)


def everything_is_signalled(folder: Path) -> Found:
    """As batch systems do it: the checkpoint engine gets the signal too."""
    with listening() as heard:
        training = Training(folder, timeout=30, stop_timeout=25)
        with Checkpointer(training.run, folder / "ckpts") as c:
            assert isinstance(c._engine, NodeEngine)

            def inside(step: int) -> None:
                if step == 3:
                    pid = c._engine.pid  # type: ignore[attr-defined]
                    for number in (signal.SIGUSR1, signal.SIGTERM):
                        os.kill(pid, number)
                        signal_me(number)

            with pytest.raises(sapwood.Stopped) as error:
                train(training, inside)
        training.close()
    return found(training, error.value, heard)


def test_the_engine_may_be_signalled_as_well(tmp_path: Path) -> None:
    (one,) = ranks.spawn(everything_is_signalled, 1, tmp_path, env=ENV)
    assert (one["step"], one["saved"]) == (3, True)
    ranks.spawn(go_on, 1, tmp_path, 3, env=ENV)


# -- time --------------------------------------------------------------------------------------


def run_out_of_time(folder: Path) -> Found:
    with listening() as heard:
        # How long it took to come here says nothing about what is tested.
        training = Training(folder, timeout=30, time_limit=process_age() + 2, stop_timeout="20s")
        with Checkpointer(training.run, folder / "ckpts") as c:
            c.restore_latest()
            with pytest.raises(sapwood.Stopped) as error:
                train(training, lambda step: None, 10**6)
        training.close()
    return found(training, error.value, heard)


def test_a_time_limit_stops_all_ranks_in_time(tmp_path: Path) -> None:
    results = ranks.spawn(run_out_of_time, WORLD, tmp_path, env=ENV)
    assert len({one["step"] for one in results}) == 1
    for one in results:
        assert one["saved"]
        assert one["reason"].startswith("the time limit (")
    ranks.spawn(go_on, WORLD, tmp_path, results[0]["step"], env=ENV)


def test_a_limit_that_is_over_ends_the_run_before_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(sapwood.Stopped, match="was over before the run began") as error:
        Training(tmp_path, time_limit=1e-3)
    assert (error.value.code, error.value.step) == (75, 0)
    assert "raise time_limit=, or start the job anew" in caplog.text


def test_an_attempt_after_the_limit_was_near_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age = process_age({"TORCHELASTIC_RESTART_COUNT": "1"})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(sapwood.Stopped):
        Training(tmp_path, time_limit=age + 30, stop_timeout=60)
    Training(tmp_path, time_limit=age + 600, stop_timeout=60).close()


def test_a_restarted_rank_counts_from_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {os.getpid(): 2000, os.getppid(): 1000}
    monkeypatch.setattr(clock, "process_start", starts.__getitem__)
    ticks = os.sysconf("SC_CLK_TCK")
    difference = process_age({"TORCHELASTIC_RESTART_COUNT": "2"}) - process_age({})
    assert abs(difference - 1000 / ticks) < 5


def test_slurm_says_when_a_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 90 < slurm_seconds_left({"SLURM_JOB_END_TIME": str(time.time() + 100)}) <= 100
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(sapwood.SapwoodError, match="give a time such as '3h55m' instead"):
        Training(tmp_path, time_limit="slurm")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 1))
    with pytest.raises(sapwood.Stopped, match="the end of the Slurm job"):
        Training(tmp_path, time_limit="slurm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": "soon"}, r'time_limit is .soon., expected seconds or .*"3h55m"'),
        ({"time_limit": 0}, "time_limit is 0, expected a time such as"),
        ({"stop_timeout": "-1s"}, "stop_timeout is .-1s., expected"),
        ({"stop_signals": ["SIGSTOP"]}, "stop_signals has .SIGSTOP."),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(sapwood.SapwoodError, match=message):
        Training(tmp_path, **options)


# -- checkpoints by time -----------------------------------------------------------------------


def save_by_time(folder: Path, mode: str) -> tuple[list[int], list[int], float]:
    training = Training(folder, timeout=30)
    with Checkpointer(
        training.run, folder / "ckpts", every="0.3s", mode=mode, overhead=0.9, keep=None
    ) as c:
        c.restore_latest()
        began = time.monotonic()
        # Until there are three, which is for the ranks to agree on: they end together.
        seen = 0
        while seen < 3:
            train(training, lambda step: None, training.run.step_count + 1)
            seen = len(c.stats.saves)
            flag = torch.tensor([float(seen)])
            training.run.group.broadcast(flag, "counting").wait()
            seen = int(flag)
        took = time.monotonic() - began
        c.wait()
    training.close()
    return [s.id.step for s in c.stats.saves], c.stats.skipped, took


@pytest.mark.parametrize("mode", ["auto", "lazy"])
def test_checkpoints_by_time_are_of_the_same_steps_on_all_ranks(tmp_path: Path, mode: str) -> None:
    first, second = ranks.spawn(save_by_time, WORLD, tmp_path, mode, env=ENV)
    assert first[0] == second[0]
    assert len(first[0]) >= 3
    assert first[2] >= 3 * 0.3
    wholes = sorted(p.name[:8] for p in (tmp_path / "ckpts").glob("0*"))
    assert wholes == [f"{step:08d}" for step in first[0]]


@pytest.mark.parametrize("every", ["50", "0s", "often", "", "-3s"])
def test_an_interval_that_is_none_is_refused(tmp_path: Path, every: str) -> None:
    training = Training(tmp_path)
    with pytest.raises(sapwood.SapwoodError, match="every is "):
        Checkpointer(training.run, tmp_path / "ckpts", every=every)
    training.close()


def test_the_environment_may_say_steps_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from sapwood.checkpoint.settings import CheckpointSettings
    from sapwood.runtime.settings import resolve

    monkeypatch.setenv("SAPWOOD_CHECKPOINT_EVERY", "50")
    assert resolve(CheckpointSettings, "checkpoint", {}).value.steps == 50
    monkeypatch.setenv("SAPWOOD_CHECKPOINT_EVERY", "10min")
    assert resolve(CheckpointSettings, "checkpoint", {}).value.seconds == 600


# -- several Runs ------------------------------------------------------------------------------


def two_runs(folder: Path, backward_first: bool) -> tuple[list[int], list[int], bool, list[str]]:
    """Two trainings in one loop, as a GAN has; the steps they were stopped at, and restored to."""
    trainings = [Training(folder / name) for name in "dg"]
    savers = [
        sapwood.Checkpointer(t.run, folder / name / "ckpts", engine="sync")
        for t, name in zip(trainings, "dg", strict=True)
    ]

    def forward_and_backward(training: Training) -> None:
        x, y = batch(training.run.step_count, training.rank)
        F.cross_entropy(training.run.model(x), y).backward()

    def loop() -> None:
        while True:
            for training in reversed(trainings) if backward_first else ():
                forward_and_backward(training)
            for training in trainings:
                if not backward_first:
                    forward_and_backward(training)
                if training.run.step_count == 3 and training is trainings[0]:
                    signal_me()
                training.run.step()
                time.sleep(0.01)

    with listening() as heard, pytest.raises(sapwood.Stopped) as caught:
        loop()
    stopped = [t.run.step_count for t in trainings]
    for one in (*savers, *trainings):
        one.close()
    restored = []
    for name in "dg":
        training = Training(folder / name)
        with sapwood.Checkpointer(training.run, folder / name / "ckpts", engine="sync") as saver:
            found = saver.restore_latest()
        restored.append(-1 if found is None else found.step)
        training.close()
    return stopped, restored, caught.value.saved, heard


@pytest.mark.parametrize("world", [1, 2])
def test_all_runs_of_a_process_are_saved(tmp_path: Path, world: int) -> None:
    for stopped, restored, saved, _ in ranks.spawn(two_runs, world, tmp_path, False):
        assert restored == stopped
        assert min(stopped) >= 3
        assert saved


def test_a_run_in_the_middle_of_a_step_is_not_saved_and_that_is_said(tmp_path: Path) -> None:
    ((stopped, restored, saved, heard),) = ranks.spawn(two_runs, 1, tmp_path, True)
    assert restored == [stopped[0], -1]
    assert not saved
    assert any("in the middle of a step" in line for line in heard)


def only_listens(folder: Path) -> tuple[bool, list[str]]:
    training = Training(folder)
    training.run.events.subscribe(sapwood.RunStopping, lambda event: None, name="flush")
    with listening() as heard, pytest.raises(sapwood.Stopped) as caught:
        train(training, lambda step: signal_me())
    training.close()
    return caught.value.saved, heard


def test_who_only_listens_saves_nothing(tmp_path: Path) -> None:
    ((saved, heard),) = ranks.spawn(only_listens, 1, tmp_path)
    assert not saved
    assert "step 1 is not saved: the run has no Checkpointer" in heard
