"""A file that is replaced while it is read: a named error in every way of reading, no signal."""

from __future__ import annotations

import os
import shutil
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sapwood.data import LmdbReader, LmdbRecords, build_index
from sapwood.data.source import Source
from sapwood.errors import DataError
from sapwood.testing import ranks
from tests.data.databases import numbered, plain

NOTICED = "changed while it was read|it was cut off"
WAYS: dict[str, dict[str, Any]] = {
    "mapped": {"policy": "auto", "shuffle": "global"},
    "guessed": {"policy": "lmm-dm", "shuffle": "none"},
    "py-lmdb": {"policy": "lmdb"},
    "chunks": {"policy": "coal"},
    "direct": {"policy": "dio"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "train.mdb"
    plain(made, numbered(500, lambda n: 3000))
    return made


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """As large as the other one and of the same structure: only the bytes of records differ."""
    made = tmp_path / "new.mdb"
    plain(made, numbered(500, lambda n: 3000, seed=1))
    return made


def replace(path: Path, other: Path, how: str) -> None:
    if how == "cp":
        shutil.copyfile(other, path)  # as cp does: the same file is cut off and filled anew
    elif how == "cut off":
        os.truncate(path, 2 * 4096 + 100)
    else:
        os.truncate(path, 0)


def read_on(path: Path, other: Path, how: str, options: dict[str, Any]) -> str:
    reader = LmdbReader(path, 10, chunk=4096, memory=40_000, **options)
    batches = iter(reader)
    next(batches)
    replace(path, other, how)
    try:
        for _ in batches:
            pass
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["cp", "cut off", "emptied"])
def test_between_two_batches(path: Path, other: Path, how: str) -> None:
    good = path.read_bytes()
    for way, options in WAYS.items():
        # In a process of its own, which is gone if there is a signal after all.
        (said,) = ranks.spawn(read_on, 1, path, other, how, options)
        assert "train.mdb: " in said, way
        assert any(one in said for one in NOTICED.split("|")), (way, said)
        path.write_bytes(good)


def read_all_the_time(path: Path, other: Path) -> list[str]:
    said, good = [], path.read_bytes()
    for turn in range(12):
        path.write_bytes(good)
        reader = LmdbReader(path, 50, shuffle="global", epochs=None)
        batches = iter(reader)
        next(batches)
        thread = threading.Timer(0.002 * turn, replace, (path, other, "cp" if turn % 2 else "0"))
        thread.start()
        try:
            for _ in batches:
                pass
        except DataError as error:
            said.append(str(error))
        thread.join()
        reader.close()
    return said


def test_in_the_middle_of_a_batch(path: Path, other: Path) -> None:
    """No check before it was touched could see to that."""
    (said,) = ranks.spawn(read_all_the_time, 1, path, other)
    assert len(said) == 12
    assert all("changed while it was read" in one or "it was cut off" in one for one in said)


def take_on(path: Path, other: Path, how: str) -> str:
    records = LmdbRecords(path)
    records.take(range(20))
    replace(path, other, how)
    try:
        records.take(range(400, 500))
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["cp", "emptied"])
def test_records_by_number(path: Path, other: Path, how: str) -> None:
    (said,) = ranks.spawn(take_on, 1, path, other, how)
    assert "changed while it was read" in said or "it was cut off" in said


def keep_reading(path: Path, index: Path, other: Path) -> int:
    reader = LmdbReader(path, 10)
    batches = iter(reader)
    next(batches)
    shutil.copyfile(other, index)
    return len(list(batches))


def test_an_index_that_is_copied_over_the_one_in_use(path: Path, tmp_path: Path) -> None:
    """As ``cp new/* .`` does it, with the database; this one is of another and shorter."""
    LmdbReader(path, 10)
    small = tmp_path / "small.mdb"
    plain(small, numbered(5, lambda n: 10))
    LmdbReader(small, 5)
    name = ".sapwood-index"
    of, to = small.with_name(small.name + name), path.with_name(path.name + name)
    assert ranks.spawn(keep_reading, 1, path, to, of) == [49]


def test_a_file_moved_over_the_other_is_another_file(path: Path, other: Path) -> None:
    """What is open goes on; the next loop notices."""
    expected = [value for _, value in numbered(500, lambda n: 3000)]
    reader = LmdbReader(path, 50)
    batches = iter(reader)
    found = [next(batches)]
    other.replace(path)
    for batch in [*found, *batches]:
        assert [bytes(one) for one in batch] == [expected[n] for n in batch.index.tolist()]
    with pytest.raises(DataError, match="make a new reader"):
        next(iter(reader))


def test_more_pieces_than_one_call_takes(path: Path) -> None:
    expected = [value for _, value in numbered(500, lambda n: 3000)]
    records = LmdbRecords(path)
    numbers = list(islice((n * 7 % 500 for n in range(3000)), 3000))
    assert [bytes(one) for one in records.take(numbers)] == [expected[n] for n in numbers]


def test_where_the_system_does_not_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may forbid the call."""
    expected = [value for _, value in numbered(500, lambda n: 3000)]
    source = Source(build_index(path))
    monkeypatch.setattr("sapwood.data.source._LIBC", Forbidden())
    index = build_index(path)
    data = source.gather(index.offsets[[3, 1, 499]], index.lengths_of(index.offsets[[3, 1, 499]]))
    assert data.tobytes() == expected[3] + expected[1] + expected[499]
    source.close()


class Forbidden:
    def process_vm_writev(self, *arguments: int) -> int:
        return -1
