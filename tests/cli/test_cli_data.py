"""``sapwood data`` as a user runs it."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from sapwood.cli import words
from sapwood.cli.main import main
from sapwood.data import list_databases
from tests.cli.helpers import sapwood, start, wait_for
from tests.data.databases import environment, numbered, plain
from tests.data.sources import images


def test_index_inspect_verify(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(50, lambda n: 100 * n))
    facts = json.loads(sapwood("data", "inspect", "a.mdb", "--json", tmp_path=tmp_path).stdout)
    assert (facts["records"], facts["longest"], facts["named"]) == (50, 4900, {})
    made = sapwood("data", "index", "a.mdb", tmp_path=tmp_path)
    assert "50 records" in made.stdout
    assert (tmp_path / "a.mdb.sapwood-index").exists()
    sound = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert sound.returncode == 0
    assert "fits the database" in sound.stdout
    plain(path, [(b"one", b"more")])
    stale = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert stale.returncode == 1
    assert "another state" in stale.stderr


def test_damage_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.mdb").write_bytes(b"no database" * 100)
    failed = sapwood("data", "verify", "a.mdb", tmp_path=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.startswith("sapwood: a.mdb: page 0: expected LMDB's mark")
    assert failed.stderr.count("\n") == 1


def test_convert_compact_and_bench(tmp_path: Path) -> None:
    images(tmp_path / "in", {"a": 20, "b": 20})
    made = sapwood("data", "convert", "in", "a.mdb", "--shuffle", "0", tmp_path=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("a.mdb: 40 records, ")
    assert "named databases with the same keys: .names, .labels" in made.stdout
    shown = sapwood("data", "inspect", "a.mdb", tmp_path=tmp_path).stdout
    assert "converted from:          folder" in shown
    assert "classes:                 2" in shown
    copied = sapwood("data", "compact", "a.mdb", "b.mdb", tmp_path=tmp_path)
    assert copied.returncode == 0, copied.stderr
    assert " before, " in copied.stdout
    timed = sapwood("data", "bench", "b.mdb", "--seconds", "0.03", tmp_path=tmp_path)
    assert timed.returncode == 0, timed.stderr
    assert "of disk" in timed.stdout
    assert "raw disk" in timed.stdout
    again = sapwood("data", "convert", "in", "a.mdb", tmp_path=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "a.mdb exists; use --force" in again.stderr


@pytest.mark.parametrize("verb", ["index", "inspect", "verify", "convert", "compact", "bench"])
def test_the_help_of_each_verb_teaches_with_examples(verb: str, capsys) -> None:
    assert main(["data", verb, "--help"]) == 0
    assert capsys.readouterr().out.count(f"sapwood data {verb}") >= 2


@pytest.mark.parametrize(
    ("number", "code", "left"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, []),
        (signal.SIGKILL, -9, [".a.mdb.draft-sapwood"]),
    ],
)
def test_a_signal_leaves_no_half_file(
    tmp_path: Path, number: int, code: int, left: list[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((500, 1000), np.uint8))
    slow = start(
        *("data", "convert", "x.npy", "a.mdb"),
        tmp_path=tmp_path,
        SAPWOOD_FAULTS="data.convert:sleep:60@100",
    )
    draft = tmp_path / ".a.mdb.draft-sapwood"
    wait_for(lambda: draft.exists() and draft.stat().st_size, "the draft")
    slow.send_signal(number)
    _, error = slow.communicate(timeout=60)
    assert slow.returncode == code, error
    assert "Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*left, "tmp", "x.npy"])
    done = sapwood("data", "convert", "x.npy", "a.mdb", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mdb", "tmp", "x.npy"]


def test_verify_looks_at_every_database_of_a_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.mdb"
    with environment(path) as env, env.begin(write=True) as txn:
        named = env.open_db(b"labels", txn=txn)
        for number in range(300):
            txn.put(b"%04d" % number, bytes(3000))
            txn.put(b"%04d" % number, b"%d" % number, db=named)
    assert main(["data", "verify", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 300 records: every page is as it should be",
        f"{path}, 'labels': 300 records: every page is as it should be",
    ]
    root = list_databases(path)[b"labels"].root
    with path.open("r+b") as file:
        file.seek(root * 4096)
        file.write(b"\xff" * 8)
    assert main(["data", "verify", str(path)]) == 1
    caught = capsys.readouterr()
    assert caught.out.count("as it should be") == 1  # that of the main one
    assert f"page {root}: expected its own number" in caught.err
    assert main(["data", "verify", str(path), "--name", "labels"]) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def convert_and_bench(tmp_path: Path) -> None:
    images(tmp_path / "in", {"a": 20, "b": 20})
    assert main(["data", "convert", "in", "a.mdb"]) == 0
    assert main(["data", "bench", "a.mdb", "--seconds", "0.03"]) == 0


def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch) -> None:
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", shown)
    convert_and_bench(tmp_path)
    for what in ("converting", "checking", "reading warm"):
        assert what in shown.getvalue()


def test_a_log_shows_how_far_it_is_now_and_then(tmp_path: Path, monkeypatch, capsys) -> None:
    convert_and_bench(tmp_path)
    assert capsys.readouterr().err == ""  # it was quick
    (tmp_path / "a.mdb").unlink()
    monkeypatch.setattr(words, "_LINE_EVERY", 0.0)
    (tmp_path / "in").rename(tmp_path / "old")
    convert_and_bench(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    done = [line for line in lines if line.startswith("sapwood: converting: ")]
    assert len(done) == 40
    assert re.fullmatch(r"sapwood: converting: 100%, (.+B) of \1", done[-1])
    assert any(line.startswith("sapwood: reading warm: ") for line in lines)
    assert all(line.endswith("%") for line in lines if "reading" in line)
