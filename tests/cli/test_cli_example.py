from __future__ import annotations

from pathlib import Path

from sapwood.cli.folders import list_runs
from tests.cli.helpers import sapwood

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_plain_loop.py"


def test_the_first_example_learns_on_two_ranks(tmp_path):
    done = sapwood("run", "-n", "2", str(EXAMPLE), "--steps", "40", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last, summary = done.stdout.splitlines()
    assert float(last.split()[-1]) < float(first.split()[-1])
    assert "2 ranks, 40 steps" in summary
    (run,) = list_runs(tmp_path / "runs")
    assert (run.state, run.ranks, run.step) == ("ended", 2, 40)
