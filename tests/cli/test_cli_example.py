from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sapwood.cli.folders import list_runs
from tests.cli.helpers import environment, sapwood

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "01_plain_loop.py"


def test_the_first_example_learns_on_two_ranks(tmp_path):
    done = sapwood("run", "-n", "2", str(EXAMPLE), "--steps", "40", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last, summary = done.stdout.splitlines()
    assert float(last.split()[-1]) < float(first.split()[-1])
    assert "2 ranks, 40 steps" in summary
    (run,) = list_runs(tmp_path / "runs")
    assert (run.state, run.ranks, run.step) == ("ended", 2, 40)
    # Said once, at the start, by rank 0.
    told = [line for line in done.stderr.splitlines() if line.startswith("sapwood: ")]
    assert told == [f"sapwood: run {run.id} in runs/{run.id}"]


def test_the_checkpoint_example_goes_on_where_it_was_on_any_number_of_ranks(tmp_path):
    script = str(EXAMPLES / "02_checkpoint.py")
    done = sapwood("run", "-n", "2", script, "--steps", "20", "--every", "5", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 ranks, from step 0"
    assert " checkpoints kept training waiting " in done.stdout
    done = sapwood("run", "-n", "1", script, "--steps", "24", "--every", "4", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 ranks, from step 20"


def test_the_data_example_goes_on_in_mid_epoch_on_any_number_of_ranks(tmp_path):
    script = str(EXAMPLES / "05_data.py")
    done = sapwood("run", "-n", "2", script, "--steps", "30", "--every", "5", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 ranks, from step 0: epoch 0, batch 0 of 21"
    done = sapwood("run", "-n", "3", script, "--steps", "40", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "3 ranks, from step 30: epoch 1, batch 9 of 21"


def test_the_search_example_starts_candidates_from_their_ancestors(tmp_path):
    options = ["--candidates", "3", "--steps", "40", "--folder", str(tmp_path / "models")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "06_search.py"), *options],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("candidate@1 (64, 64): 40 steps from scratch")
    assert "steps from candidate@1: 4 layers" in done.stdout
    assert "with ancestors" in lines[-1]
    listed = sapwood("store", "ls", "--at", str(tmp_path / "models"), tmp_path=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [
        "candidate@1",
        "candidate@2",
        "candidate@3",
    ]
