"""``sapwood fork``: a running example is forked from another terminal."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sapwood.cli.folders import RunInfo, list_runs
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


def test_one_fork_for_each_value(tmp_path: Path) -> None:
    with running(tmp_path) as parent:
        done = sapwood(
            "fork",
            parent.id[:8],
            "--vary",
            "optimizer.lr=[0.5,0.25]",
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
        assert rates == {"0.5", "0.25"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing", "--", FORK], "no run 'nothing'"),
        (["ended", "--", FORK], "takes no clones"),
        (["ended"], "there is no script to fork"),
        (["ended", "--set", "optimizer.lr", "--", FORK], "expected a path and a value"),
        (["ended", "--vary", "optimizer.lr=3", "--", FORK], "expected a list"),
    ],
)
def test_what_cannot_be_forked(tmp_path: Path, words: list[str], told: str) -> None:
    ended = tmp_path / "runs" / "ended"
    ended.mkdir(parents=True)
    (ended / "run.toml").write_text('id = "ended"\n')
    done = sapwood("fork", *words, tmp_path=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


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
