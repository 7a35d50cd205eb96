from __future__ import annotations

import json

import pytest

from sapwood.cli.main import main
from sapwood.data.stats import ReadStats, Recorder
from sapwood.trace import open_trace
from tests.trace.example import write_example


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_example(tmp_path / "runs" / "example" / "trace")
    return "example"


def test_a_step_is_drawn_as_text(run, capsys):
    assert main(["trace", run, "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 1 of run example")
    assert "rank 1 main" in text


def test_the_latest_run_with_a_trace(run, tmp_path, capsys):
    facts = 'id = "example"\ncreated = "2026-11-16T00:00:00+00:00"\nworld = 2\n'
    (tmp_path / "runs" / "example" / "run.toml").write_text(facts)
    newer = tmp_path / "runs" / "newer"
    newer.mkdir()
    (newer / "run.toml").write_text(facts.replace("2026", "2027"))
    assert main(["trace", "latest"]) == 0
    assert " of run example" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_no_line_is_longer_than_the_terminal(run, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["trace", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    assert "one column is" in text
    assert "^ last gradient exists" in text
    assert "| step ended" in text


def test_json_for_programs(run, capsys):
    assert main(["trace", run, "--step", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "example"
    assert [row["rank"] for row in told["ranks"]] == [0, 1]
    assert told["ranks"][0]["step_ms"] == 10.0
    assert told["step"]["step"] == 1
    forward = next(one for one in told["step"]["records"] if one["name"] == "forward")
    assert (forward["rank"], forward["lane"], forward["ms"]) == (0, "main", 3.0)
    assert forward["args"] == {"step": 1}
    assert sum(one["name"] == "reduce" for one in told["step"]["records"]) == 8
    assert told["reading"] == []


def test_perfetto_and_svg_files(run, tmp_path, capsys):
    assert main(["trace", run, "--perfetto", "out.json", "--svg", "out.svg"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert "ui.perfetto.dev" in capsys.readouterr().out


def test_summary_has_a_row_per_rank(run, capsys):
    assert main(["trace", run, "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "3", "10.00", "1.00", "4.0", "75%"]
    assert lines[2].split()[0] == "1"


def test_summary_tells_what_reading_cost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        path = tmp_path / "runs" / "reads" / "trace" / f"rank-{rank}.jsonl"
        trace = open_trace(path, rank=rank, world=2, run_id="reads")
        recorder = Recorder(trace)
        recorder.stats = ReadStats(samples=100, bytes_read=2_000_000, bytes_useful=10**6)
        recorder.stats.requests = 2
        recorder.summarise("train.mdb")
        recorder.stats.missed_pages = 7
        recorder.summarise("train.mdb")
        trace.close()
    assert main(["trace", "reads", "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("read from train.mdb")
    assert " ".join(lines[at + 2].split()) == "0 100 2.0 0.50 977 0.00 0.00 0.00 0.00"
    assert lines[at + 3].split()[0] == "1"
    assert "pages missed 14, redundant 0" in lines[at + 4]


def test_a_torn_line_is_mentioned_and_passed_over(run, tmp_path, capsys):
    with (tmp_path / "runs/example/trace/rank-0.jsonl").open("a") as file:
        file.write('{"n":"ha')
    assert main(["trace", run]) == 0
    assert "torn last line skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "`sapwood runs` lists what there is"),
        (["example", "--step", "99"], "it has steps 0 to 2"),
        (["latest"], "no run in runs has a trace"),
        (["example", "--json", "--summary"], "leave the other options away"),
        (["example", "--svg", "no/such/folder/x.svg"], "cannot write"),
    ],
)
def test_mistakes_are_one_line(run, arguments, message, capsys):
    assert main(["trace", *arguments]) == 1
    assert message in capsys.readouterr().err
