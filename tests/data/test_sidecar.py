"""An index that is kept fits its database, or is not used."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.data import sidecar
from sapwood.data.index import Index, build_index
from sapwood.data.pagefile import data_file
from sapwood.data.sidecar import index_file, load_index, open_index, save_index
from sapwood.errors import ConfigError, DataError
from sapwood.testing import ranks
from tests.data.databases import contents, numbered, plain, reference


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a.mdb"
    plain(path, numbered(301, lambda n: n * 13))
    return path


def test_kept_and_mapped(database: Path) -> None:
    made = open_index(database)
    kept = database.with_name("a.mdb.sapwood-index")
    assert index_file(database) == kept
    before = kept.stat()
    again = open_index(database, when_stale="refuse")
    assert contents(again) == contents(made) == reference(database)
    assert again.fingerprint == made.fingerprint
    assert kept.stat().st_mtime_ns == before.st_mtime_ns
    assert not again.offsets.flags.writeable
    assert [p.name for p in database.parent.iterdir() if "draft" in p.name] == []


def test_moved_on(database: Path) -> None:
    open_index(database)
    plain(database, [(b"one more", b"value")])
    with pytest.raises(DataError, match=r"of another state .* transaction 4, .* is at 5"):
        open_index(database, when_stale="refuse")
    assert contents(open_index(database)) == reference(database)
    assert len(open_index(database, when_stale="refuse")) == 302


def test_a_touched_database_is_walked_again(database: Path) -> None:
    open_index(database)
    os.utime(database, ns=(1, 1))
    with pytest.raises(DataError, match="another state"):
        open_index(database, when_stale="refuse")


def test_every_flipped_byte_of_the_index_is_noticed(database: Path) -> None:
    open_index(database)
    kept = index_file(database)
    good = kept.read_bytes()
    head = len(good[:4096].rstrip(b"\0"))
    used = [*range(0, head, 7), *range(4096, len(good), 101), len(good) - 1]
    for at in used:
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        kept.write_bytes(bad)
        with pytest.raises(DataError):
            load_index(kept, database)
    for size in (0, 1, 4095, 4096, 5000, len(good) - 1):
        kept.write_bytes(good[:size])
        with pytest.raises(DataError):
            load_index(kept, database)
    assert contents(open_index(database)) == reference(database)
    assert kept.read_bytes() == good


def test_an_index_that_lies_about_offsets_is_refused(database: Path) -> None:
    index = build_index(database)
    wrong = index.offsets.copy()
    wrong[5] = database.stat().st_size - 3
    save_index(type(index)(**{**vars(index), "offsets": wrong}), database.with_name("i"))
    with pytest.raises(DataError, match="outside of the database"):
        load_index(database.with_name("i"), database)


def test_empty_database(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, [(b"a", b"b")])
    index = build_index(path)
    none = {name: getattr(index, name)[:0] for name in ("offsets", "lengths")}
    none |= {name: getattr(index, name)[:0] for name in ("key_offsets", "key_lengths")}
    save_index(type(index)(**{**vars(index), **none}), tmp_path / "i")
    assert len(load_index(tmp_path / "i", path)) == 0


def test_another_database_of_the_file(database: Path) -> None:
    open_index(database, file=database.with_name("i"))
    with pytest.raises(DataError, match="another state"):
        load_index(database.with_name("i"), database, "named")
    assert index_file(database, "named") != index_file(database)


def test_a_place_that_cannot_be_written(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        index = open_index(database, file=database / "below a file" / "i")
    assert contents(index) == reference(database)
    assert "not kept" in caplog.text
    with pytest.raises(DataError, match=r"is a folder; give the name of a file in it"):
        save_index(index, ".")


def test_cache_when_the_folder_is_read_only(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    open_index(database)
    kept = index_file(database)
    assert kept.is_relative_to(tmp_path / "cache")
    assert np.array_equal(load_index(kept, database).offsets, build_index(database).offsets)


def test_policy_is_one_of_two(database: Path) -> None:
    with pytest.raises(ConfigError, match="when_stale='maybe': expected 'rebuild' or 'refuse'"):
        open_index(database, when_stale="maybe")  # type: ignore[arg-type]


def build_slowly(path: str, seconds: float) -> tuple[int, int]:
    """Open the index; gives how many records it has, and how many indexes this rank made."""
    built = []

    def build(*arguments: Any) -> Index:
        built.append(arguments)
        ranks.mark("building")
        time.sleep(seconds if ranks.rank() == 0 or seconds < 1 else 0)
        return build_index(*arguments)

    sidecar.build_index = build
    return len(open_index(path)), len(built)


def test_one_of_many_processes_makes_the_index(database: Path) -> None:
    before = set(database.parent.iterdir())
    found = ranks.spawn(build_slowly, 4, str(database), 0.3)
    assert {records for records, _ in found} == {len(open_index(database))}
    assert sum(built for _, built in found) == 1
    assert set(database.parent.iterdir()) - before == {index_file(database)}


def test_when_the_one_that_makes_the_index_is_killed_another_does(database: Path) -> None:
    before = set(database.parent.iterdir())
    with ranks.start(build_first_then_others, 2, str(database)) as group:
        group.wait_mark("building", rank=0, timeout=30)
        group.wait_mark("next", rank=1, timeout=30)
        group.kill(0, signal.SIGKILL)
        outcomes = group.wait(timeout=30)
    assert outcomes[1].value == (len(open_index(database)), 1)
    assert set(database.parent.iterdir()) - before == {index_file(database)}


def build_first_then_others(path: str) -> tuple[int, int]:
    """Rank 0 has the lock and keeps it; rank 1 comes when it has."""
    if ranks.rank() == 1:
        with data_file(path).open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(0.01)
        ranks.mark("next")
    return build_slowly(path, 60)
