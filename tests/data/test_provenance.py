"""Offsets computed from how a database was written are right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.data import LmdbReader, Provenance, build_index
from sapwood.errors import ConfigError
from tests.data.databases import environment, numbered, plain, reference


@pytest.mark.parametrize("size", [2030, 3000, 4080, 4081, 20_000])
@pytest.mark.parametrize("count", [1, 100, 156, 157, 312, 313, 2000])
@pytest.mark.parametrize("append", [False, True])
def test_one_transaction_and_its_copy(tmp_path: Path, size: int, count: int, append: bool) -> None:
    path, copy = tmp_path / "a.mdb", tmp_path / "copy"
    written = "append" if append else "load"
    with environment(path, map_size=2**30) as env:
        with env.begin(write=True) as txn:
            for key, value in numbered(count, lambda n: size):
                txn.put(key, value, append=append)
        env.copy(str(copy), compact=True)
    facts = {"count": count, "key_bytes": 8, "value_bytes": size}
    index = build_index(path)
    found = Provenance(written=written, **facts).checked(index)
    assert (found == index.offsets).all()
    index = build_index(copy)
    found = Provenance(written="compacted", source=written, **facts).checked(index)
    assert (found == index.offsets).all()


@pytest.mark.parametrize("key_bytes", [40, 200, 511])
@pytest.mark.parametrize("append", [False, True])
def test_deep_trees(tmp_path: Path, key_bytes: int, append: bool) -> None:
    """Long keys make few nodes of a page, and so a tree of many levels of few records."""
    path, copy, count = tmp_path / "a.mdb", tmp_path / "copy", 7000
    written = "append" if append else "load"
    with environment(path) as env:
        with env.begin(write=True) as txn:
            for n in range(count):
                txn.put(b"%0*d" % (key_bytes, n), b"v" * 2100, append=append)
        env.copy(str(copy), compact=True)
    facts = {"count": count, "key_bytes": key_bytes, "value_bytes": 2100}
    Provenance(written=written, **facts).checked(build_index(path))
    Provenance(written="compacted", source=written, **facts).checked(build_index(copy))


def test_reading_by_it(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(300, lambda n: 3000), commit=300)
    facts = Provenance(written="load", count=300, key_bytes=8, value_bytes=3000)
    expected = reference(path)
    for batch in LmdbReader(path, 32, policy="prov", provenance=facts):
        assert [bytes(one) for one in batch] == [expected[n][1] for n in batch.index.tolist()]
    with pytest.raises(ConfigError, match="policy='prov' needs provenance="):
        next(iter(LmdbReader(path, 32, policy="prov")))


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(3000, lambda n: 3000), commit=100)
    facts = {"written": "load", "count": 3000, "key_bytes": 8, "value_bytes": 3000}
    index = build_index(path)
    with pytest.raises(ConfigError, match="was written in several transactions"):
        Provenance(**facts).checked(index)
    with pytest.raises(ConfigError, match="300 records in pages of 4096 bytes expected"):
        Provenance(**{**facts, "count": 300}).checked(index)
    with pytest.raises(ConfigError, match="values of 3001 bytes and keys of 8 expected"):
        Provenance(**{**facts, "value_bytes": 3001}).checked(index)
    with pytest.raises(ConfigError, match="lie in leaves between keys"):
        Provenance(**{**facts, "value_bytes": 100}).offsets()
