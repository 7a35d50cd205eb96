"""Wrong arguments are our errors: they name the argument, what it was, and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.data import (
    LmdbReader,
    LmdbRecords,
    Provenance,
    Reuse,
    Stagger,
    build_index,
    compact,
    convert,
    index_file,
    list_databases,
    load_index,
    open_index,
    read_about,
    readings_of,
    save_index,
    skew_of,
)
from sapwood.errors import ConfigError, UsageError
from sapwood.runtime.stores import HashStore
from tests.data.databases import numbered, plain


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("arguments") / "a.mdb"
    plain(made, numbered(40, lambda n: 60))
    return made


WHOLE = ["3", 3.0, None, True, [3], 1 + 0j, np.array([1, 2])]
WORDS = [5, None, b"none", ["none"], "None"]
PATHS = [5, None, b"a.mdb", ["a.mdb"]]
READER: dict[str, list[Any]] = {
    "path": PATHS,
    "batch_size": WHOLE,
    "database": [5, ["x"], 1.5],
    "shuffle": WORDS,
    "seed": WHOLE,
    "epochs": ["3", 1.5, True, [3]],
    "tail": WORDS,
    "decode": [5, "decode", [len]],
    "policy": WORDS,
    "share": ["no", 0, None],
    "streams": WHOLE,
    "window": [*WHOLE, "64 MiB", 1e6],
    "reuse": [2, {"factor": 2}],
    "chunk": ["1", 4096.0, True, 0],
    "memory": ["1 GiB", 1e9, True, 0],
    "threads": WHOLE,
    "timeout": ["3", None, True, [3], float("nan"), float("inf")],
    "rank": ["0", 0.0, True],
    "index": [5, b"index", ["index"]],
    "provenance": ["load", {"written": "load"}],
    "stagger": [2, HashStore()],
    "trace": [None, "trace", True],
}


def options_of(name: str, value: Any) -> dict[str, Any]:
    more = {"rank": {"world": 2}, "reuse": {"shuffle": "reuse"}}.get(name, {})
    return {"batch_size": 10, **more, name: value}


@pytest.mark.parametrize("name", READER)
def test_a_reader(path: Path, name: str) -> None:
    for value in READER[name]:
        options = {"path": path, **options_of(name, value)}
        with pytest.raises(ConfigError, match=f"{name}=.*expected"):
            LmdbReader(**options)


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    reader = LmdbReader(
        path, np.int64(10), seed=np.int32(3), epochs=np.uint8(1), window=np.int64(9)
    )
    assert reader.state_dict()["order"]["batch"] == 10
    assert type(reader.state_dict()["order"]["seed"]) is int
    reader.set_epoch(np.int64(2))
    assert type(reader.epoch) is int
    assert len(list(reader)) == 4


def state(**changes: Any) -> Callable[[LmdbReader], Any]:
    return lambda reader: reader.load_state_dict({**reader.state_dict(), **changes})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *((lambda one, v=v: one.set_epoch(v), "epoch=.*expected") for v in [*WHOLE, -1]),
        *((lambda one, v=v: one.load_state_dict(v), "not the state") for v in (None, [], "x", 3)),
        *((state(epoch=v), "not the state.*epoch") for v in ("3", 2.7, None, -1, True)),
        *((state(batch=v), "not the state.*batch") for v in ("3", 2.7, None, -1, 4, 10**9)),
        *((state(until=v), "not the state.*until") for v in ("3", 2.7, None, -2)),
        (state(order=None), "not the state"),
        (state(order={}), "of another order"),
        (state(version="one"), "not the state.*version"),
    ],
)
def test_methods_of_a_reader(path: Path, call: Callable[[LmdbReader], Any], says: str) -> None:
    reader = LmdbReader(path, 10)
    next(iter(reader))
    with pytest.raises(ConfigError, match=says):
        call(reader)
    assert reader.state_dict()["batch"] == 1  # it is where it was
    reader.close()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *((lambda p, v=v: LmdbRecords(v), "path=") for v in PATHS),
        (lambda p: LmdbRecords(p, database=5), "database="),
        (lambda p: LmdbRecords(p, decode="x"), "decode="),
        (lambda p: LmdbRecords(p, index=5), "file="),
        *((lambda p, v=v: LmdbRecords(p)[v], "record=") for v in ("a", 1.0, None, True, slice(3))),
        *(
            (lambda p, v=v: LmdbRecords(p).take(v), "records=.*expected a list or array")
            for v in ("abc", 3, None, [1.5], ["a"], [True, False], [[1]], [[1], [2, 3]], {1: 2})
        ),
        *((lambda p, v=v: Reuse(factor=v), "factor=") for v in [*WHOLE, 0]),
        (lambda p: Reuse(node_streams="4"), "node_streams="),
        *((lambda p, v=v: Reuse(scope=v), "scope=.*expected one of process") for v in WORDS),
        (lambda p: Stagger(store=None), "store="),
        (lambda p: Stagger(store="127.0.0.1"), "store="),
        (lambda p: Stagger(store=HashStore(), size="2"), "size="),
        (lambda p: Stagger(store=HashStore(), adapt=1.5), "adapt="),
        (lambda p: Provenance(written="x", count=1, key_bytes=8, value_bytes=9), "written="),
        (lambda p: Provenance(written="load", count="1", key_bytes=8, value_bytes=9), "count="),
        *((lambda p, v=v: open_index(v), "path=") for v in PATHS),
        *((lambda p, v=v: build_index(v), "path=") for v in PATHS),
        *((lambda p, v=v: list_databases(v), "path=") for v in PATHS),
        *((lambda p, v=v: index_file(v), "path=") for v in PATHS),
        *((lambda p, v=v: read_about(v), "path=") for v in PATHS),
        (lambda p: load_index(5, p), "file="),
        (lambda p: load_index(p, 5), "path="),
        (lambda p: save_index("index", p), "index="),
        (lambda p: save_index(open_index(p), 5), "file="),
        (lambda p: open_index(p, 5), "database="),
        (lambda p: open_index(p, file=5), "file="),
        (lambda p: open_index(p, when_stale=5), "when_stale="),
        (lambda p: build_index(p, ["x"]), "database="),
        (lambda p: build_index(p, thorough="yes"), "thorough="),
        (lambda p: build_index(p, progress=5), "progress="),
        (lambda p: index_file(p, 5), "database="),
        *((lambda p, v=v: convert(v, "x.mdb"), "source=") for v in PATHS),
        *((lambda p, v=v: convert(p, v), "dest=") for v in PATHS),
        (lambda p: convert(p, "x.mdb", kind=5), "kind="),
        (lambda p: convert(p, "x.mdb", columns="jpg"), "columns=.*expected a list"),
        (lambda p: convert(p, "x.mdb", columns=[5]), "columns="),
        (lambda p: convert(p, "x.mdb", suffixes=".txt"), "suffixes=.*expected a list"),
        (lambda p: convert(p, "x.mdb", shuffle="0"), "shuffle="),
        (lambda p: convert(p, "x.mdb", shuffle=-1), "shuffle=-1: expected 0 or more"),
        (lambda p: convert(p, "x.mdb", whole="no"), "whole="),
        (lambda p: convert(p, "x.mdb", force="no"), "force="),
        (lambda p: convert(p, "x.mdb", phase=5), "phase="),
        *((lambda p, v=v: compact(v, "x.mdb"), "path=") for v in PATHS),
        *((lambda p, v=v: compact(p, v), "dest=") for v in PATHS),
        (lambda p: compact(p, "x.mdb", force="no"), "force="),
        (lambda p: compact(p, "x.mdb", compare=1), "compare="),
        (lambda p: skew_of("trace"), "trace="),
        (lambda p: readings_of(None), "trace="),
    ],
)
def test_everything_else(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, UsageError), match=says):
        call(path)
    assert list(tmp_path.iterdir()) == []


def test_records_that_are_not_there(path: Path) -> None:
    records = LmdbRecords(path)
    expected = [value for _, value in numbered(40, lambda n: 60)]
    assert [bytes(one) for one in records.take([-1, 0, -40])] == [expected[n] for n in (39, 0, 0)]
    assert records.take([-1, 0]).index.tolist() == [39, 0]
    assert len(records.take([])) == 0
    for wrong in (40, -41, 10**12):
        with pytest.raises(IndexError, match=f"record {wrong} of 40"):
            records.take([0, wrong])
        with pytest.raises(IndexError, match=f"record {wrong} of 40"):
            records[wrong]
