"""How a file comes to the page cache, and how it is known whether it is there."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from sapwood.data import open_index, source
from sapwood.data.source import Source
from sapwood.data.stats import Recorder
from sapwood.errors import DataError
from tests.data.databases import numbered, plain


@pytest.mark.parametrize("advice", [source._POPULATE_READ, 9999])
def test_bytes_are_brought_to_memory(
    tmp_path: Path, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On systems that can and that cannot; and what is not there any more is an error."""
    path = tmp_path / "a.mdb"
    plain(path, numbered(2000, lambda n: 3000))
    monkeypatch.setattr(source, "_POPULATE_READ", advice)
    drop(path)
    opened = Source(open_index(path))
    memory, size = opened.mapped(), path.stat().st_size
    opened.bring(memory, 5000, size - 7)
    assert opened.resident() > 0.9
    with path.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(DataError, match="it was cut off"):
        opened.bring(memory, size // 4, size)
    opened.close()


def test_the_pace_of_a_disk_is_that_of_the_second_half() -> None:
    recorder = Recorder()
    assert recorder.pace() == math.inf
    reads = recorder.helper()
    reads.request(500, 0, 10**9)
    recorder.stats.wait_seconds = 100.0
    recorder.halfway()
    assert recorder.pace() == math.inf, "nobody has waited since"
    reads.request(100, 0, 10**9)
    recorder.stats.wait_seconds += 4.0
    assert recorder.pace() == reads.pace() == 25.0


def test_asking_whether_a_file_is_in_memory_does_not_bring_it_there(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(8000, lambda n: 3000), commit=4000)
    source = Source(open_index(path))
    drop(path)
    if source.resident() > 0.1:
        pytest.skip("this file system keeps all files in memory")
    drop(path)
    assert [source.resident() < 0.1 for _ in range(5)] == [True] * 5
    path.read_bytes()
    assert source.resident() == 1
    source.close()


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
