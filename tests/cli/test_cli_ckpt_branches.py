"""``sapwood ckpt`` and branches: what is current, abandoned, or of another training."""

from __future__ import annotations

from pathlib import Path

import pytest

import sapwood
from tests.checkpoint.training import Training
from tests.cli.checkpoints import ask, told


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str, str, str]:
    """Steps 2 to 8 of a; 6 of b, restored from 4 of a; and 2 of c, another training, before."""
    attempts = []
    for steps, restored in (((2,), None), ((2, 4, 6, 8), None), ((6,), 4)):
        training = Training(tmp_path)
        with sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", engine="sync", keep=None
        ) as ckpt:
            if restored:
                ckpt.restore(restored)
            for step in steps:
                training.steps(step)
                report = ckpt.save(metrics={"loss": 1.0})
            attempts.append(report.id.attempt)
        training.close()
    c, a, b = attempts
    return str(tmp_path / "ckpts"), a, b, c


def test_ls_shows_branches(capsys, place) -> None:
    folder, a, b, c = place
    rows = ask(capsys, "ls", folder)
    found = {row["id"]: row["branch"] for row in rows}
    assert found == {
        f"00000002-{c}": "other training",
        f"00000002-{a}": "current",
        f"00000004-{a}": "current",
        f"00000006-{a}": "abandoned",
        f"00000006-{b}": "current",
        f"00000008-{a}": "abandoned",
    }
    last = next(row for row in rows if row["attempt"] == b)
    assert last["parent"] == f"00000004-{a}"
    assert last["ancestry"] == [f"00000004-{a}"]
    assert last["run"]
    assert last["began"] > next(row for row in rows if row["attempt"] == a)["began"]
    text = told(capsys, "ls", folder)
    assert "abandoned" in text
    assert f"attempt {a}: from scratch; left after step 4" in text
    assert f"attempt {b}: restored from 00000004-{a}" in text


def test_latest_and_a_step_are_those_of_the_current_branch(capsys, place) -> None:
    folder, a, b, _ = place
    for name, id in (("latest", f"00000006-{b}"), ("6", f"00000006-{b}"), ("8", f"00000008-{a}")):
        found = ask(capsys, "inspect", f"{folder}/{name}")
        assert found["id"] == id
    assert found["branch"] == "abandoned"
    assert "branch: current" in told(capsys, "inspect", f"{folder}/latest")


def test_prune_keeps_the_current_branch_and_judges_other_trainings_by_themselves(
    capsys, place
) -> None:
    folder, a, b, c = place
    told(capsys, "prune", folder, "--last", "2", "--yes")
    assert [row["id"] for row in ask(capsys, "ls", folder)] == [
        f"00000002-{c}",
        f"00000004-{a}",
        f"00000006-{b}",
    ]
