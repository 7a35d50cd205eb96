"""``sapwood runs prune``: what goes is shown first, and nothing goes that somebody may need."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sapwood.cli.main import main
from tests.cli.test_cli_runs import make_run


def days_ago(days: int) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of every kind, of which the first are the oldest."""
    root = tmp_path / "runs"
    make_run(root, "lives", state="running", created=days_ago(90))
    make_run(root, "ended", created=days_ago(80))
    make_run(root, "stopped", state="stopped", created=days_ago(70))
    make_run(root, "failed", state="failed", created=days_ago(60))
    make_run(root, "died", state="running", pid=2**22 + 1, created=days_ago(50))
    make_run(root, "interrupted", state="interrupted", created=days_ago(40))
    make_run(root, "young", created=days_ago(1))
    (make_run(root, "damaged") / "status.json").unlink()
    trace = root / "ended" / "trace"
    trace.mkdir()
    (trace / "rank-0.jsonl").write_text("{}")
    (root / "ended" / "engine-n0.log").write_text("")
    return root


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    """Sit at a terminal; what was asked."""
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return text

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    return asked


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (["--older", "30d"], {"ended", "failed", "died", "interrupted"}),
        (["--older", "55d"], {"ended", "failed"}),
        (["--last", "3"], {"ended", "failed"}),
        (["--last", "100"], set()),
        (["--last", "0"], {"ended", "failed", "died", "interrupted", "young"}),
        (["--state", "failed", "--state", "died"], {"failed", "died"}),
        (["--state", "stopped"], {"stopped"}),
        (["--state", "damaged"], {"damaged"}),
        (["--state", "damaged", "--older", "1d"], set()),
        (["--last", "3", "--older", "70d"], {"ended"}),
    ],
)
def test_rules(runs: Path, rules: list[str], gone: set[str], capsys) -> None:
    before = left(runs)
    assert main(["runs", "prune", *rules, "--yes"]) == 0
    assert before - left(runs) == gone
    out = capsys.readouterr().out
    assert all(f"{one} (" in out for one in gone)
    if gone:
        assert out.splitlines()[-1] == f"{len(gone)} runs removed"
    else:
        assert "no runs to remove" in out


def test_nothing_goes_without_a_yes(runs: Path, monkeypatch, capsys) -> None:
    before = left(runs)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["runs", "prune", "--older", "55d"]) == 0
    out = capsys.readouterr().out
    assert "ended (ended, 80d old, " in out
    assert out.splitlines()[-1] == "nothing was removed; add --yes to do it"
    asked = answers(monkeypatch, "")
    assert main(["runs", "prune", "--older", "55d"]) == 0
    assert len(asked) == 1
    assert asked[0].startswith("remove these 2 runs (")
    assert "nothing was removed" in capsys.readouterr().out
    assert left(runs) == before
    answers(monkeypatch, "y")
    assert main(["runs", "prune", "--older", "55d"]) == 0
    assert before - left(runs) == {"ended", "failed"}


def test_checkpoints_in_a_run_folder_are_not_lost_silently(runs: Path, capsys) -> None:
    shard = runs / "ended" / "ckpts" / "00000015-3f9a1c" / "shard-0"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(5000))
    assert main(["runs", "prune", "--older", "55d", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "ended stays: it holds ckpts (" in out
    assert "--everything removes it, too" in out
    assert shard.exists()
    assert not (runs / "failed").exists()
    assert main(["runs", "prune", "--older", "55d", "--yes", "--everything"]) == 0
    assert ", with ckpts (" in capsys.readouterr().out
    assert not (runs / "ended").exists()


def test_what_changed_while_somebody_thought_stays(runs: Path, monkeypatch, capsys) -> None:
    def meanwhile(question: str) -> str:
        status = runs / "failed" / "status.json"
        status.write_text(status.read_text().replace("failed", "running"))
        (runs / "ended" / "weights.pt").touch()
        return "yes"

    answers(monkeypatch, "")
    monkeypatch.setattr("builtins.input", meanwhile)
    assert main(["runs", "prune", "--older", "55d"]) == 1
    told = capsys.readouterr()
    assert "failed is running now, and stays" in told.err
    assert "ended holds more than it did, and stays" in told.err
    assert told.out.splitlines()[-1] == "0 runs removed"
    assert left(runs) >= {"failed", "ended"}


def test_a_link_is_not_followed(runs: Path, tmp_path: Path, capsys) -> None:
    elsewhere = make_run(tmp_path / "archive", "kept", created=days_ago(99))
    (runs / "kept").symlink_to(elsewhere)
    assert main(["runs", "prune", "--older", "95d", "--yes"]) == 1
    assert "kept is a link to" in capsys.readouterr().err
    assert (elsewhere / "run.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 1, "say which runs may go"),
        (["nowhere", "--last", "1"], 1, "there is no folder nowhere"),
        (["--last", "-1"], 1, "--last is -1, expected 0 or more"),
        (["--older", "soon"], 1, "--older is 'soon'"),
        (["--state", "running"], 2, "running"),
    ],
)
def test_mistakes(runs: Path, arguments: list[str], code: int, told: str, capsys) -> None:
    before = left(runs)
    assert main(["runs", "prune", *arguments]) == code
    assert told in capsys.readouterr().err
    assert left(runs) == before
