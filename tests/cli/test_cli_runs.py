from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
import torch

import sapwood
from sapwood.cli.folders import CLONES, TRACE, as_tree, find_run, list_runs
from sapwood.cli.main import main
from sapwood.errors import PeerFailed, RunFolderError
from sapwood.runtime.facts import final_status


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def make_run(
    root: Path,
    run_id: str,
    *,
    state: str = "ended",
    created: str = "2026-11-16T00:00:00+00:00",
    parent: str | None = None,
    host: str | None = None,
    pid: int | None = None,
    ticks: int | None = None,
    error: str | None = None,
    overrides: dict[str, object] | None = None,
) -> Path:
    folder = root / run_id
    folder.mkdir(parents=True)
    pid = os.getpid() if pid is None else pid
    lines = [f'id = "{run_id}"', f'created = "{created}"', "world = 2"]
    if parent:
        lines += [f'parent = "{parent}"', "parent_step = 40"]
    if overrides:
        made = {path: json.dumps(value) for path, value in overrides.items()}
        lines += ["[overrides]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in made.items())]
    lines += ["[host]", f'name = "{host or platform.node()}"', f"pid = {pid}"]
    lines.append(f"started = {started(os.getpid()) if ticks is None else ticks}")
    (folder / "run.toml").write_text("\n".join(lines))
    status = {"state": state, "step": 7, "time": 0.0}
    (folder / "status.json").write_text(json.dumps(status | ({"error": error} if error else {})))
    return folder


def states(root: Path) -> dict[str, str]:
    return {run.id: run.state for run in list_runs(root)}


def test_states_are_told_apart(tmp_path):
    make_run(tmp_path, "here", state="running")
    make_run(tmp_path, "gone", state="running", pid=2**22 + 1)
    make_run(tmp_path, "reused", state="running", ticks=1)
    make_run(tmp_path, "elsewhere", state="running", host="another-host", pid=2**22 + 1)
    make_run(tmp_path, "done")
    make_run(tmp_path, "broken", state="failed", error="ValueError: x")
    make_run(tmp_path, "interrupted", state="interrupted")
    assert states(tmp_path) == {
        "here": "running",
        "gone": "died",
        "reused": "died",
        "elsewhere": "running",
        "done": "ended",
        "broken": "failed",
        "interrupted": "interrupted",
    }


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.toml", "id = ", "Invalid value"),
        ("run.toml", 'id = "x"', "no key"),
        ("run.toml", None, "run.toml is missing"),
        ("status.json", "{", "Expecting property name"),
        ("status.json", "[]", "list indices"),
        ("status.json", '{"state": "dancing", "step": 1}', "says state 'dancing'"),
        ("status.json", None, "status.json is missing"),
    ],
)
def test_a_damaged_folder_is_listed_with_the_reason(tmp_path, name, text, why, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    make_run(tmp_path, "good")
    file = make_run(tmp_path, "bad") / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert states(tmp_path) == {"good": "ended", "bad": "damaged"}
    assert main(["runs", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad")]
    assert "damaged" in line
    assert why in line


def test_forks_are_shown_below_their_parents(tmp_path, capsys):
    make_run(tmp_path, "root", created="2026-11-16T00:00:00+00:00")
    make_run(tmp_path, "other", created="2026-11-16T01:00:00+00:00")
    make_run(tmp_path, "child", created="2026-11-16T02:00:00+00:00", parent="root")
    make_run(tmp_path, "grandchild", created="2026-11-16T03:00:00+00:00", parent="child")
    make_run(tmp_path, "orphan", created="2026-11-16T04:00:00+00:00", parent="deleted")
    tree = [(depth, run.id) for depth, run in as_tree(list_runs(tmp_path))]
    assert tree == [(0, "root"), (1, "child"), (2, "grandchild"), (0, "other"), (0, "orphan")]
    main(["runs", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("└ child")
    assert "root @ 40" in lines[2]
    assert lines[3].startswith("  └ grandchild")


def test_runs_that_name_each_other_as_parents_are_still_listed(tmp_path):
    make_run(tmp_path, "a", parent="b")
    make_run(tmp_path, "b", parent="a")
    make_run(tmp_path, "self", parent="self")
    assert {run.id for _, run in as_tree(list_runs(tmp_path))} == {"a", "b", "self"}


def test_json_for_programs(tmp_path, capsys):
    make_run(tmp_path, "one", state="failed", error="boom")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["id"], run["state"], run["detail"], run["ranks"], run["step"]) == (
        "one",
        "failed",
        "boom",
        2,
        7,
    )
    assert (run["averaging"], run["averaging_reason"]) == (None, None)


def test_what_was_changed_in_a_fork_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    make_run(tmp_path, "a", created="2026-11-16T00:00:00+00:00")
    changes = {"optimizer.lr": 0.01, "data.mix": ["x", {"y": None}]}
    made = {"created": "2026-11-16T01:00:00+00:00", "parent": "a", "overrides": changes}
    make_run(tmp_path, "b", state="failed", error="ValueError: x", **made)
    assert main(["runs", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1].rstrip()
    assert line.endswith('optimizer.lr=0.01 data.mix=["x", {"y": null}]; ValueError: x')
    assert main(["runs", str(tmp_path), "--json"]) == 0
    parent, child = json.loads(capsys.readouterr().out)
    assert (parent["overrides"], child["overrides"]) == ({}, changes)


def test_a_run_that_is_interrupted_says_so(tmp_path, capsys):
    model = torch.nn.Linear(2, 2)
    run = sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.model(torch.ones(1, 2)).sum().backward()
    run.step()
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert main(["runs", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"]) == ("interrupted", 1)
    assert found["detail"] == "by Ctrl-C (SIGINT); what was not saved is lost"
    peer = PeerFailed("rank 1 failed: KeyboardInterrupt: ", rank=1)
    assert final_status(3, peer, None)[0] == "interrupted"
    assert final_status(3, PeerFailed("rank 1 failed: ValueError: x"), None)[0] == "failed"


def test_json_tells_how_gradients_are_averaged(tmp_path, capsys):
    made = make_run(tmp_path, "one")
    with (made / "run.toml").open("a") as facts:
        facts.write('\n[layout]\naveraging = "node"\naveraging_reason = "1 machine: 0-1"\n')
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["averaging"], run["averaging_reason"]) == ("node", "1 machine: 0-1")


def test_an_empty_folder_and_folders_that_are_no_runs(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_a_run_is_found_by_folder_id_or_beginning(tmp_path, monkeypatch):
    first = make_run(tmp_path, "2026-a")
    with pytest.raises(RunFolderError, match="no run is named"):
        find_run("", tmp_path)  # `sapwood fork "$RUN"`, with RUN unset
    make_run(tmp_path, "2026-b")
    assert find_run(str(first), tmp_path) == first
    assert find_run("2026-a", tmp_path).resolve() == first
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir("/")
        assert find_run("2026-a", tmp_path) == first
    with pytest.raises(RunFolderError, match="several runs: 2026-a, 2026-b"):
        find_run("2026", tmp_path)
    with pytest.raises(RunFolderError, match="`sapwood runs` lists"):
        find_run("2027", tmp_path)


def test_the_latest_run_is_the_one_that_began_last(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run in .* yet"):
        find_run("latest", tmp_path)
    first = make_run(tmp_path, "z", state="running", created="2026-11-16T00:00:00+00:00")
    second = make_run(tmp_path, "y", created="2026-11-16T01:00:00+00:00")
    same_second = make_run(tmp_path, "x", created="2026-11-16T01:00:00+00:00")
    os.utime(second / "run.toml", (1, 1))
    assert find_run("latest", tmp_path) == same_second
    with pytest.raises(RunFolderError, match=r"has a trace; make it with Run\(trace=True\)"):
        find_run("latest", tmp_path, need=TRACE)
    (second / "trace").mkdir()
    (second / "trace" / "rank-0.jsonl").touch()
    assert find_run("latest", tmp_path, need=TRACE) == second
    (same_second / "address").touch()  # left behind: it has ended
    with pytest.raises(RunFolderError, match="can be forked now"):
        find_run("latest", tmp_path, need=CLONES)
    (first / "address").touch()
    assert find_run("latest", tmp_path, need=CLONES) == first
    make_run(tmp_path, "latest", created="2020-11-16T00:00:00+00:00")
    assert find_run("latest", tmp_path).name == "latest"


@pytest.mark.parametrize("columns", [None, 100, 60])
def test_a_long_message_cuts_no_other_column(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    message = "PeerFailed: " + "rank 1 did not answer " * 20 + "end"
    make_run(tmp_path, "20261116-0042-3f9a1c", state="failed", error=message)
    make_run(tmp_path, "20261116-0043-aaaaaa")
    assert main(["runs", str(tmp_path)]) == 0
    header, first, second = sorted(capsys.readouterr().out.splitlines(), key=lambda x: x[0] != "r")
    assert header.split() == ["run", "state", "ranks", "step", "started", "age", "parent"]
    assert first.split()[:4] == ["20261116-0042-3f9a1c", "failed", "2", "7"]
    assert second.split()[:4] == ["20261116-0043-aaaaaa", "ended", "2", "7"]
    if columns is None:
        assert first.rstrip().endswith(message)
    else:
        assert "PeerFailed: rank 1" in first
        assert first.rstrip().endswith("…")
    if columns == 100:
        assert len(first) <= 100
