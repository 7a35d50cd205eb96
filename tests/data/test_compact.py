"""A compacted copy has the same records, or there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sapwood.data import build_index, compact, list_databases
from sapwood.data.write import compact as module
from sapwood.errors import ConfigError, DataError
from tests.data.databases import contents, environment, numbered, plain, reference


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with holes, named databases and keys with several values."""
    made = tmp_path / "a.mdb"
    plain(made, numbered(600, lambda n: 50 * n % 9000))
    with environment(made) as env:
        pairs = env.open_db(b"pairs", dupsort=True)
        with env.begin(write=True) as txn:
            for n in range(0, 600, 2):
                txn.delete(f"{n:08d}".encode())
            for n in range(200):
                txn.put(b"%d" % (n % 7), b"%05d" % n, db=pairs)
    return made


def test_the_same_records_in_a_smaller_file(tmp_path: Path, path: Path) -> None:
    done = compact(path, tmp_path / "b.mdb")
    assert done.after == (tmp_path / "b.mdb").stat().st_size < done.before == path.stat().st_size
    assert (done.records, done.databases) == (500, 2)
    for name in (None, b"pairs"):
        assert contents(build_index(tmp_path / "b.mdb", name)) == reference(path, name)
    assert list(list_databases(tmp_path / "b.mdb")) == [b"pairs"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mdb", "b.mdb"]


def test_in_place_and_from_a_folder(tmp_path: Path, path: Path) -> None:
    expected = reference(path)
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "data.mdb")
    compact(folder, path, compare=False)
    with pytest.raises(ConfigError, match="exists; use --force"):
        compact(path, path)
    before = path.stat().st_size
    compact(path, path, force=True)
    assert path.stat().st_size <= before
    assert reference(path) == expected


def test_damage_is_refused_before_liblmdb_sees_it(tmp_path: Path, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    index = build_index(path)
    at = int(index.key_offsets[3]) // index.page_size * index.page_size
    raw[at + 10] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a.mdb: page"):
        compact(path, tmp_path / "b.mdb")
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError):
        compact(path, tmp_path / "b.mdb")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mdb"]


def test_a_copy_that_differs_is_noticed(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module._write
    last = reference(path)[-1][1][:32]
    spoiled: list[bool] = []

    def spoil(fd: int, block: bytes) -> None:
        wrong = bytearray(block)
        at = bytes(wrong).find(last)
        if at >= 0:
            wrong[at] ^= 1
            spoiled.append(True)
        write(fd, bytes(wrong))

    monkeypatch.setattr(module, "_write", spoil)
    with pytest.raises(DataError, match="record 299 is not that of"):
        compact(path, tmp_path / "b.mdb")
    assert spoiled
    assert not (tmp_path / "b.mdb").exists()


def test_a_database_that_changes_meanwhile(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = module._copy

    def change(*arguments) -> None:
        copy(*arguments)
        plain(path, [(b"one", b"more")])

    monkeypatch.setattr(module, "_copy", change)
    with pytest.raises(DataError, match="changed while it was copied"):
        compact(path, tmp_path / "b.mdb")
    assert not (tmp_path / "b.mdb").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_leaving_early_ends_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(2000, lambda n: 5000))  # far more than a pipe holds

    def fail(fd: int, block: bytes) -> None:
        os.write(fd, block)
        raise error

    monkeypatch.setattr(module, "_write", fail)
    expected = DataError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        compact(path, tmp_path / "b.mdb")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mdb"]
