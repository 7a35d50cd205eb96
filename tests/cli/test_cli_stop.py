"""Runs that are asked to stop under real launchers: what restarts them, and what they exit with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sapwood.cli import limit, process
from sapwood.cli.limit import Limit
from sapwood.runtime.notes import read_notes
from tests.cli.helpers import DEADLINE, environment, sapwood, start, wait_for

# Trains to step 8, and prints every loss exactly. As FILE says, a rank signals itself once, or
# all go on until somebody else sends a signal.
TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import sapwood
    from sapwood.checkpoint.checkpointer import Checkpointer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = Path("how").read_text()
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    Path(f"attempts-{os.environ['RANK']}").open("a").write("x")
    limit = "2s" if how == "over" else "24h" if how == "limit" else None
    run = sapwood.Run(model, optimizer, stop_timeout="30s", timeout=60, time_limit=limit)
    ckpt = sapwood.Checkpointer(run, "ckpts", every=3)
    ckpt.restore_latest()
    torch.manual_seed(run.rank) if run.step_count == 0 else None
    while run.step_count < (8 if how in ("straight", "usr1") else 10**6):
        step = run.step_count + 1
        data = torch.Generator().manual_seed(100 * step + run.rank)
        loss = run.model(torch.randn(4, 8, generator=data)).square().mean()
        loss.backward()
        with Path(f"losses-{run.rank}").open("a") as file:
            file.write(f"{step} {loss.item().hex()}\\n")
        if how == "limit" and run.rank == 1 and step == 4:
            run._stopping._limit = time.monotonic() + 10  # less than a stop may take
        if (how, first, run.rank, step) == ("usr1", True, 1, 4):
            os.kill(os.getpid(), signal.SIGUSR1)
        Path("ready").touch()
        time.sleep(0.01)
        run.step()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def prepare(folder: Path, how: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "how").write_text(how)
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    return "train.py"


def losses(folder: Path) -> list[list[str]]:
    return [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(2)]


def states(folder: Path) -> list[tuple[str, int]]:
    done = sapwood("runs", "--json", tmp_path=folder)
    return [(run["state"], run["step"]) for run in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = sapwood("run", "-n", "2", prepare(folder, "straight"), tmp_path=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder)


def check_went_on(folder: Path, undisturbed: list[list[str]]) -> None:
    """Bit for bit what an undisturbed run has, no step twice, and the attempts told apart."""
    assert losses(folder) == undisturbed
    (stopped, step), ended = states(folder)
    assert (stopped, ended) == ("stopped", ("ended", 8))
    assert 4 <= step <= 8


def test_sapwood_run_starts_a_stopped_run_again(tmp_path: Path, undisturbed) -> None:
    name = prepare(tmp_path, "usr1")
    done = sapwood("run", "-n", "2", "--restarts", "1", name, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    check_went_on(tmp_path, undisturbed)


def test_torchrun_starts_a_stopped_run_again(tmp_path: Path, undisturbed) -> None:
    name = prepare(tmp_path, "usr1")
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts=1", name],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_went_on(tmp_path, undisturbed)


def test_without_restarts_the_exit_code_asks_for_one(tmp_path: Path) -> None:
    done = sapwood("run", "-n", "2", prepare(tmp_path, "usr1"), tmp_path=tmp_path)
    assert done.returncode == 75
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sapwood: stopped after step ")
    assert last.endswith("(saved): SIGUSR1 to rank 1; start it again to go on")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "tmp").glob("sapwood-run*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_stops_all_and_restarts_none(tmp_path: Path, number) -> None:
    name = prepare(tmp_path, "wait")
    launcher = start("run", "-n", "2", "--restarts", "3", name, tmp_path=tmp_path)
    wait_for(lambda: (tmp_path / "ready").exists() or launcher.poll() is not None, "a step")
    launcher.send_signal(number)
    launcher.send_signal(number)  # some senders say it twice
    _, errors = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 75, errors
    assert f"(saved): {number.name} to rank" in errors.splitlines()[-1]
    ((state, step),) = states(tmp_path)
    assert state == "stopped"
    assert len(losses(tmp_path)[0]) == step


def test_a_run_that_is_interrupted_did_not_fail(tmp_path: Path) -> None:
    name = prepare(tmp_path, "wait")
    launcher = start("run", "-n", "2", "--restarts", "3", name, tmp_path=tmp_path)
    wait_for(lambda: (tmp_path / "ready").exists() or launcher.poll() is not None, "a step")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 130, errors
    (run,) = json.loads(sapwood("runs", "--json", tmp_path=tmp_path).stdout)
    assert run["state"] == "interrupted", run
    assert run["detail"].startswith("by Ctrl-C (SIGINT)")
    assert (tmp_path / "attempts-0").read_text() == "x"


def test_a_stop_by_the_time_limit_is_not_started_again(tmp_path: Path) -> None:
    name = prepare(tmp_path, "limit")
    done = sapwood("run", "-n", "2", "--restarts", "3", name, tmp_path=tmp_path)
    assert done.returncode == 75, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "(saved): the time limit (1d) is near" in last
    assert last.endswith("it is not restarted inside this job; start the job again to go on")
    assert (tmp_path / "attempts-0").read_text() == (tmp_path / "attempts-1").read_text() == "x"
    ((state, step),) = states(tmp_path)
    assert (state, len(losses(tmp_path)[0])) == ("stopped", step)


def test_a_run_whose_time_is_over_before_it_begins_is_not_started_again(tmp_path: Path) -> None:
    name = prepare(tmp_path, "over")
    (tmp_path / name).write_text("import time\ntime.sleep(2)\n" + (tmp_path / name).read_text())
    done = sapwood("run", "--restarts", "3", name, tmp_path=tmp_path)
    assert done.returncode == 75, done.stderr
    assert "was over before the run began" in done.stderr.splitlines()[-1]
    assert (tmp_path / "attempts-0").read_text() == "x"
    assert not (tmp_path / "losses-0").exists()


# -- how long ranks may take -------------------------------------------------------------------


def note(folder: Path, attempt: int, **facts: object) -> None:
    (folder / str(attempt)).mkdir(parents=True, exist_ok=True)
    (folder / str(attempt) / "0.json").write_text(json.dumps(facts))


def seconds(folder: Path, grace: float | None, *, patient: bool = True) -> float:
    made = Limit(folder, grace)
    made.close()
    return made._seconds(1000.0, patient=patient)


def test_ranks_get_as_long_as_they_say_they_need(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert seconds(notes, None) == 10
    note(notes, 0, needs=60.0)
    assert seconds(notes, None) == 130
    assert seconds(notes, None, patient=False) == 10
    assert seconds(notes, 5) == 5
    note(notes, 0, needs=60.0, until=1100.0)
    assert seconds(notes, None) == 110
    note(notes, 1)  # another attempt, which has no run yet
    assert seconds(notes, None) == 10
    (notes / "1" / "0.json").write_text("not json")
    assert read_notes(notes) == []


def test_what_takes_longer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "_GRACE", 0.05)
    monkeypatch.setattr(limit, "_POLL", 0.01)
    killed: list[float] = []
    monkeypatch.setattr(process, "kill_descendants", lambda: killed.append(time.monotonic()))
    made = Limit(tmp_path, None)
    made.begin(patient=True)
    wait_for(lambda: bool(killed), "the kill")
    made.close()
