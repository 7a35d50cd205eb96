"""A run's folder: ids, run.toml, and a status that is never half written."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given

from sapwood.errors import RunFolderError
from sapwood.runtime.folder import (
    STARTED,
    RunFolder,
    host_facts,
    new_run_id,
    process_start,
    to_toml,
)


def read(folder: RunFolder) -> dict[str, Any]:
    return tomllib.loads((folder.path / "run.toml").read_text(encoding="utf-8"))


def test_ids_are_sortable_names_and_not_made_twice() -> None:
    ids = [new_run_id() for _ in range(200)]
    assert len(set(ids)) == 200
    assert all(re.fullmatch(r"\d{8}-\d{4}-[0-9a-f]{6}", one) for one in ids)
    assert RunFolder("runs", ids[0]).id == ids[0]


@pytest.mark.parametrize("bad", ["", ".", "..", "../x", "a/b", "-x", "a b", "a\n", "é", "x" * 101])
def test_an_id_that_cannot_be_a_folder_is_refused(bad: str) -> None:
    with pytest.raises(RunFolderError, match="letters, digits"):
        RunFolder("runs", bad)


def test_the_word_for_the_newest_run_is_no_id() -> None:
    with pytest.raises(RunFolderError, match="cannot have the id 'latest'"):
        RunFolder("runs", "latest")


def test_the_folder_holds_what_was_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "runs", "a")
    folder.create({"world": 2, "host": host_facts(), "parent": None})
    facts = read(folder)
    assert facts["id"] == "a"
    assert facts["world"] == 2
    assert "parent" not in facts
    assert facts["host"]["pid"] == os.getpid()
    assert facts["host"]["started"] == process_start(os.getpid())
    assert folder.trace_file(3) == folder.path / "trace" / "rank-3.jsonl"
    assert sorted(one.name for one in folder.path.iterdir()) == ["run.toml", "trace"]


def test_a_run_says_once_which_it_is_and_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=STARTED):
        RunFolder(tmp_path, "a").create({"world": 2})
        changes = {"optimizer.lr": "0.01", "seed": "7"}
        forked = {"parent": "a", "parent_step": 40, "overrides": changes}
        RunFolder(tmp_path, "b").create({"world": 2, **forked})
    assert [record.getMessage() for record in caplog.records] == [
        f"run a in {tmp_path / 'a'}",
        f"run b in {tmp_path / 'b'}, forked from a after step 40, with optimizer.lr=0.01 seed=7",
    ]


def test_a_run_that_was_stopped_goes_on_under_its_id(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "a")
    first.create({"world": 1})
    first.status("stopped", 7, "stopped after step 7 (saved): SIGTERM to rank 0")
    again = RunFolder(tmp_path, "a")
    again.create({"world": 2})
    assert read(again)["world"] == 2
    for state in ("running", "failed", "ended"):
        again.status(state, 8)
        with pytest.raises(RunFolderError, match="already holds a run"):
            RunFolder(tmp_path, "a").create({"world": 1})


def test_a_run_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    RunFolder(tmp_path, "a").create({"world": 1})
    with pytest.raises(RunFolderError, match="already holds a run; choose another id"):
        RunFolder(tmp_path, "a").create({"world": 2})
    assert read(RunFolder(tmp_path, "a"))["world"] == 1


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write the run folder .*folder=") as caught:
        RunFolder(tmp_path / "runs", "a").create({})
    assert "SAPWOOD_RUN_FOLDER" in str(caught.value)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=10)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def test_a_full_disk_is_told_at_the_start(full_disk: Path) -> None:
    fill(full_disk)
    with pytest.raises(RunFolderError, match="No space left"):
        RunFolder(full_disk, "a").create({"world": 1})
    assert not list(full_disk.rglob(".run.toml*"))


def test_a_full_disk_does_not_end_a_training(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(full_disk, "a")
    folder.create({"world": 1})
    folder.status("running", 1)
    fill(full_disk)
    with caplog.at_level(logging.WARNING):
        folder.status("running", 2)
    assert "status.json: No space" in caplog.text
    assert json.loads((folder.path / "status.json").read_text())["step"] == 1
    (full_disk / "filler").unlink()
    folder.status("ended", 3, "ValueError: x")
    last = json.loads((folder.path / "status.json").read_text())
    assert (last["state"], last["step"], last["error"]) == ("ended", 3, "ValueError: x")
    assert sorted(one.name for one in folder.path.iterdir()) == ["run.toml", "status.json", "trace"]


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.create({})
    folder.status("running", 0)
    done = threading.Event()
    seen: list[int] = []

    def poll() -> None:
        while not done.is_set():
            seen.append(json.loads((folder.path / "status.json").read_text())["step"])

    reader = threading.Thread(target=poll)
    reader.start()
    for step in range(300):
        folder.status("running", step, "x" * (step * 20))
    done.set()
    reader.join(30)
    assert not reader.is_alive()
    assert seen == sorted(seen)
    assert len(seen) > 1


def test_a_status_in_passing_is_written_once_a_second(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.create({})
    for step in range(50):
        folder.status("running", step, now=False)
    # 50 writes take far less than the 49 seconds that as many turns would need.
    assert json.loads((folder.path / "status.json").read_text())["step"] < 49


def test_process_start_tells_a_process_from_a_later_one_with_its_id() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid())
    child = subprocess.Popen(["sleep", "30"])
    try:
        born = process_start(child.pid)
        assert born is not None
        assert born >= (process_start(os.getpid()) or 0)
    finally:
        child.kill()
        child.wait(10)
    assert process_start(child.pid) is None


def test_process_start_of_a_process_with_a_strange_name() -> None:
    script = b"import pathlib, time; pathlib.Path('/proc/self/comm').write_bytes(b'a) \\xff (');"
    script += b"print('named', flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"named\n"
        assert process_start(child.pid) is not None
    finally:
        child.kill()
        child.communicate(timeout=10)


SCALAR = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=True)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
KEY = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
TABLE = st.recursive(
    st.dictionaries(KEY, VALUE, max_size=4),
    lambda inner: st.dictionaries(KEY, VALUE | inner, max_size=4),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and bool(one == other)


@given(TABLE)
def test_what_is_written_as_toml_is_read_back(table: dict[str, Any]) -> None:
    assert same(table, tomllib.loads(to_toml(table)))


@pytest.mark.parametrize(
    "text", ['"', "\\", "a\nb\r\n\tc", "\x00\x1f\x7f", "é😀", "'''\"\"\"", "# no", "[a]\nb = 1", ""]
)
def test_strings_with_everything_in_them(text: str) -> None:
    table = {"value": text, "list": [text], text: {text: 1}}
    assert tomllib.loads(to_toml(table)) == table


def test_numbers_and_values_that_are_not_plain() -> None:
    table = {
        "inf": math.inf,
        "less": -math.inf,
        "nan": math.nan,
        "whole": numpy.int64(3),
        "part": numpy.float64(0.5),
        "path": Path("a"),
        "pair": (1, 2),
        "tables": [{"a": 1, "b": None}],
        "nothing": None,
        "lone": "\ud800",
        "empty": {},
    }
    found = tomllib.loads(to_toml(table))
    assert math.isnan(found.pop("nan"))
    assert found == {
        "inf": math.inf,
        "less": -math.inf,
        "whole": 3,
        "part": 0.5,
        "path": "a",
        "pair": [1, 2],
        "tables": [{"a": 1}],
        "lone": "\\ud800",
        "empty": {},
    }
