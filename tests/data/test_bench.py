"""The benchmark of a user's own database: its rows are there and make sense, on any disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.data.bench import bench, measure
from sapwood.errors import ConfigError
from tests.data.databases import environment, numbered, plain


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_all_ways_are_measured(tmp_path: Path, shuffle) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(500, lambda n: 3000))
    policies = [p for p in measure.POLICIES if p != "lmm-dm" or shuffle == "none"]
    found = bench(path, shuffle=shuffle, policies=policies, seconds=0.03, batch_size=50)
    assert (found.records, found.value_bytes) == (500, 1_500_000)
    peer = "py-lmdb cursor" if shuffle == "none" else "py-lmdb get"
    names = [*(f"sapwood {policy}" for policy in policies), peer, "raw disk"]
    for cold in {row.cold for row in found.rows}:
        rows = [row for row in found.rows if row.cold == cold]
        assert [row.name for row in rows] == names
        for row in rows[:-1]:
            assert row.samples is not None
            assert row.samples * 3000 == pytest.approx(row.nbytes)
        assert (rows[-1].samples, rows[-1].of_disk) == (None, 1.0)
    assert False in {row.cold for row in found.rows}
    assert len(found.notes) == 2 - len({row.cold for row in found.rows})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mdb"]


def test_a_named_database_whose_keys_have_several_values(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    with environment(path) as env:
        pairs = env.open_db(b"pairs", dupsort=True)
        with env.begin(write=True) as txn:
            for n in range(200):
                txn.put(b"%d" % (n % 7), b"%05d" % n, db=pairs)
    found = bench(path, database="pairs", seconds=0.03)
    assert "py-lmdb cursor" in {row.name for row in found.rows}
    assert all(row.nbytes > 0 for row in found.rows)


def test_what_cannot_be_dropped_is_left_out(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(100, lambda n: 3000))
    monkeypatch.setattr(measure, "_DROPPED", -1.0)
    monkeypatch.setattr(measure.memory, "available", lambda: 0)
    found = bench(path, seconds=0.03)
    assert found.rows == ()
    assert [note[:5] for note in found.notes] == ["cold:", "warm:"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["stag"]}, "policy='stag': expected one of auto"),
        ({"policies": ["dio", "dio"]}, "each once"),
        ({"seconds": 0}, "more than 0"),
        ({"seconds": float("nan")}, "seconds=nan: expected a finite number"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(tmp_path / "a.mdb", **options)
