"""``sapwood fork``: a running example is forked from another terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from sapwood.cli.folders import RunInfo, list_runs
from sapwood.cli.main import main
from sapwood.cli.script import Script
from sapwood.cli.verbs import fork as fork_verb
from sapwood.clone.manifest import APPROACHES
from sapwood.clone.order import ENV, ForkOrder, read_order
from sapwood.clone.settings import CloneSettings
from tests.cli.helpers import environment, sapwood

EXAMPLES = Path(__file__).parents[2] / "examples"
FORK = str(EXAMPLES / "03_fork.py")
COMMAND = [sys.executable, "-m", "sapwood.cli"]


@contextmanager
def running(tmp_path: Path, *args: str) -> Iterator[RunInfo]:
    """The example, training in the background until the block ends."""
    # It rests most of the time: the forks need the cores to begin.
    command = [*COMMAND, "run", *args, FORK, "--steps", "100000", "--pause", "0.1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield wait_for_run(tmp_path / "runs", process)
        finally:
            process.terminate()
            process.wait(30)


def wait_for_run(folder: Path, process: subprocess.Popen[bytes]) -> RunInfo:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the example ended"
        found = list_runs(folder) if folder.is_dir() else []
        if found and (found[0].folder / "address").exists():
            return found[0]
        time.sleep(0.1)
    raise AssertionError("the example did not begin")


def test_a_running_example_is_forked_with_changes(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2") as parent:
        words = ["--set", "optimizer.lr=0.01", "--set", "data.seed=7", "--", "python", FORK]
        done = sapwood(
            "fork",
            parent.id,
            "-n",
            "2",
            *words,
            "--steps",
            "100",
            "--pause",
            "0",
            tmp_path=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert f"forked from {parent.id}, 2 ranks" in done.stdout
        assert done.stdout.splitlines()[-1].endswith("lr 0.01")
        child = next(run for run in list_runs(tmp_path / "runs") if run.id != parent.id)
        assert (child.parent, child.state) == (parent.id, "ended")
        assert child.parent_step is not None
        assert child.step == child.parent_step + 100
        tree = sapwood("runs", tmp_path=tmp_path)
        assert f"└ {child.id}" in tree.stdout
        still = list_runs(tmp_path / "runs")[0]
        assert still.state == "running"


def test_one_fork_for_each_value_and_a_control_all_from_one_step(tmp_path: Path) -> None:
    with running(tmp_path) as parent:
        done = sapwood(
            "fork",
            parent.id[:8],
            "--vary",
            "optimizer.lr=[0.5,0.25]",
            "--control",
            "--",
            FORK,
            "--steps",
            "100",
            "--pause",
            "0",
            tmp_path=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        rates = {line.split()[-1] for line in done.stdout.splitlines() if " lr " in line}
        assert rates == {"0.5", "0.25", "0.001"}
        forks = [run for run in list_runs(tmp_path / "runs") if run.parent == parent.id]
        assert len({run.parent_step for run in forks}) == 1
        changes = sorted(str(dict(run.overrides)) for run in forks)
        assert changes == ["{'optimizer.lr': 0.25}", "{'optimizer.lr': 0.5}", "{}"]
        # Each says once which run it is, of what, and with which changes.
        told = [line for line in done.stderr.splitlines() if line.startswith("sapwood: run ")]
        assert sorted(line.split()[2] for line in told) == sorted(run.id for run in forks)
        assert sum(line.endswith("with optimizer.lr=0.25") for line in told) == 1
        assert all(f"forked from {parent.id} after step" in line for line in told)


# -- what is refused before anything is started ------------------------------------------------


def address_of(folder: Path) -> None:
    """Make a folder that says its run takes clones, though nobody listens there."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'id = "{folder.name}"\n')
    (folder / "token").write_text("0" * 32)
    place = {"host": "", "port": 1, "node": "", "token_file": str(folder / "token")}
    (folder / "address").write_text(json.dumps(place))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other launcher has started this process."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


SCRIPT = ["--", "train.py"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing", *SCRIPT], "no run 'nothing'"),
        (["ended", *SCRIPT], "takes no clones"),
        (["latest", *SCRIPT], "no run in runs can be forked now"),
        (["a"], "there is no script to fork"),
        (["a", "--", "-m"], "there is no script to fork"),
        (["a", "--set", "optimizer.lr", *SCRIPT], "expected a path and a value"),
        (["a", "--set", "optimizer.lr=oops", *SCRIPT], "optimizer.lr is 'oops', expected a number"),
        (["a", "--set", "optimizer.lr=-1", *SCRIPT], "is -1, expected a number, 0 or more"),
        (["a", "--set", "optimizer.lr=NaN", *SCRIPT], "is nan, expected a number"),
        (["a", "--set", "optimizer.lr=true", *SCRIPT], "is True, expected a number"),
        (["a", "--set", "optimizer.betas=[1,2]", *SCRIPT], "expected two numbers below 1"),
        (["a", "--set", "optimizer=3", *SCRIPT], "expected optimizer.NAME"),
        (["a", "--set", "optimizer.x.lr=3", *SCRIPT], "expected optimizer.NAME"),
        (["a", "--set", "optimiser.lr=0.1", *SCRIPT], "did you mean optimizer.lr?"),
        (["a", "--set", "s=1", "--set", "s=2", *SCRIPT], "--set s is given twice"),
        (["a", "--vary", "optimizer.lr=3", *SCRIPT], "expected a list"),
        (["a", "--vary", "optimizer.lr=[]", *SCRIPT], "expected a list"),
        (["a", "--vary", 'optimizer.lr=[1,"x"]', *SCRIPT], "is 'x', expected a number"),
        (["a", "--vary", "s=[1]", "--set", "s=2", *SCRIPT], "s is in --set and in --vary"),
        (["a", "--vary", f"s={list(range(20000))}", *SCRIPT], "makes 20000 forks of 1 ranks"),
        (["a", "-n", "1000000", *SCRIPT], "-n is 1000000, expected at most"),
        (["a", "--vary", "s=[1,2]", "-n", "0", *SCRIPT], "at least one rank"),
        (["a", "--control", *SCRIPT], "--control belongs to --vary"),
        (["a", "--at-step", "0", *SCRIPT], "--at-step is 0, expected 1 or more"),
        (["a", "--at-step", "9", "--standby", *SCRIPT], "give one of them"),
        (["a", "--go", *SCRIPT], "takes no script"),
        (["a", "--go", "--set", "s=1"], "takes no script and no other option"),
    ],
)
def test_what_cannot_be_forked_is_one_line(
    tmp_path: Path, words: list[str], told: str, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = tmp_path / "runs" / "ended"
    ended.mkdir(parents=True)
    (ended / "run.toml").write_text('id = "ended"\n')
    address_of(tmp_path / "runs" / "a")
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    assert main(["fork", *words]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "--approach", "x", *SCRIPT], ("deepclone", "lazy", "p2p", "file")),
        (["a", "--transport", "carrier", *SCRIPT], ("gloo", "memory", "mooncake")),
        (["a", "--bogus", "3", *SCRIPT], ("--bogus",)),
        (["a", "--bogus", "train.py"], ("--bogus",)),
        (["a", "--at-step", "soon", *SCRIPT], ("--at-step",)),
        (["a", "--at-step", "1.5", *SCRIPT], ("--at-step",)),
        ([], ("RUN",)),
    ],
)
def test_what_is_not_understood_is_exit_code_two(
    words: list[str], told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", *words]) == 2
    error = capsys.readouterr().err
    assert all(one in error for one in told)
    assert "Traceback" not in error


def test_go_is_an_error_where_nobody_stands_by(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address_of(tmp_path / "runs" / "a")
    started = {"started": 0}
    monkeypatch.setattr("sapwood.clone.listener.ask", lambda address, request: started)
    assert main(["fork", "a", "--go"]) == 1
    assert "no clones stand by" in capsys.readouterr().err
    started["started"] = 1
    assert main(["fork", "a", "--go"]) == 0
    assert "1 group that stood by begins" in capsys.readouterr().out


def test_a_script_that_forks_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for order, says in (("{}", True), ("", False)):  # a Run that was a fork leaves it empty
        monkeypatch.setenv(ENV, order)
        Script(target=str(tmp_path / "empty.py")).run()
        assert ("made no sapwood.Run" in capsys.readouterr().err) == says


def test_choices_are_those_of_the_library() -> None:
    hints = get_type_hints(CloneSettings)
    assert get_args(fork_verb.Approach) == get_args(hints["approach"]) == APPROACHES
    assert get_args(fork_verb.Transport) == get_args(hints["transport"])


def orders_of(
    monkeypatch: pytest.MonkeyPatch, *words: str
) -> list[tuple[tuple[Any, ...], ForkOrder]]:
    """What ``sapwood fork`` starts, and the order it gives to each."""
    found: list[tuple[tuple[Any, ...], ForkOrder]] = []

    def start(*args: Any, **options: Any) -> int:
        order = read_order()
        assert order is not None
        found.append(((*args, options), order))
        return 0

    class Started:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            with monkeypatch.context() as patch:
                patch.setenv(ENV, env[ENV])
                start(*command)

        def poll(self) -> int:
            return 0

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.setattr("sapwood.cli.verbs.run.run", start)
    monkeypatch.setattr("subprocess.Popen", Started)
    address_of(Path("runs/a"))
    assert main(["fork", *words]) == 0
    return found


def test_every_option_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    options = ["--approach", "lazy", "--transport", "gloo", "--set", "data.seed=7"]
    words = ["a", "-n", "2", *options, "--standby", "train.py", "--standby", "-n", "3"]
    ((started, order),) = orders_of(monkeypatch, *words)
    assert started == ("train.py", "--standby", "-n", "3", {"ranks": 2})
    assert (order.approach, order.transport) == ("lazy", "gloo")
    assert order.overrides == {"data.seed": 7}
    assert (order.standby, order.at_step, order.together) == (True, None, None)


def test_a_step_and_a_module(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    ((started, order),) = orders_of(monkeypatch, "a", "--at-step", "500", "-m", "pack.train", "-v")
    assert started == ("pack.train", "-v", {"ranks": None, "module": True})
    assert (order.standby, order.at_step) == (False, 500)


def test_variants_share_a_name_and_know_how_many_they_are(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    words = ["--vary", "optimizer.lr=[0.1,0.2]", "--vary", "seed=[1,2]", "--control"]
    words += ["--set", "b=3", "--at-step", "900"]
    found = orders_of(monkeypatch, "a", *words, "-n", "2", "--", "train.py", "--lr", "1")
    assert [order.overrides for _, order in found] == [
        {"b": 3},
        *({"b": 3, "optimizer.lr": rate, "seed": seed} for rate in (0.1, 0.2) for seed in (1, 2)),
    ]
    assert {order.at_step for _, order in found} == {900}
    (together,) = {order.together for _, order in found}
    assert together is not None
    assert together[1] == 5
    for started, _ in found:
        assert " ".join(started[1:-1]) == "-m sapwood.cli run -n 2 train.py --lr 1"


def test_variants_are_not_started_by_a_rank_of_another_launcher(
    monkeypatch: pytest.MonkeyPatch, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    address_of(Path("runs/a"))
    assert main(["fork", "a", "--vary", "s=[1,2]", "--", "train.py"]) == 1
    assert "torchrun made this process a rank" in capsys.readouterr().err


@pytest.mark.parametrize("approach", ["deepclone", "file"])
def test_the_population_example(tmp_path: Path, approach: str) -> None:
    script = str(EXAMPLES / "04_population.py")
    words = ["--members", "2", "--rounds", "1", "--seconds", "0.5", "--pause", "0.05"]
    words += ["--approach", approach]
    done = subprocess.run(
        [sys.executable, script, *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "the best is forked" in done.stdout
    assert "best in the end" in done.stdout
    runs = list_runs(tmp_path / "population")
    assert len(runs) == 3
    assert len([run for run in runs if run.parent]) == 1
