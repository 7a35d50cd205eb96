"""The walk finds what py-lmdb finds, byte for byte, in every kind of database."""

from __future__ import annotations

import random
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood.data.index import build_index, list_databases
from sapwood.errors import DataError
from tests.data.databases import contents, empty_file, environment, numbered, plain, reference

KINDS = {
    "inline": lambda n: 40 + n % 300,
    "overflow": lambda n: 3000,
    "large": lambda n: 20_000 + n,
    "mixed": lambda n: (n * 7919) % 9000,
    "at the limit": lambda n: 2010 + n % 40,
    "empty values": lambda n: 0,
}


def same(path: Path, name: bytes | None = None) -> int:
    index = build_index(path, name, thorough=True)
    expected = reference(path, name)
    assert contents(index) == expected
    assert len(index) == len(expected)
    return len(index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("commit", [7, 10_000])
def test_plain(tmp_path: Path, kind: str, commit: int) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(700, KINDS[kind]), commit)
    assert same(path) == 700


@pytest.mark.parametrize("order", ["shuffled", "append"])
def test_order_of_insertion_does_not_matter(tmp_path: Path, order: str) -> None:
    path = tmp_path / "a.mdb"
    records = numbered(5000, lambda n: n % 50)
    if order == "shuffled":
        random.Random(1).shuffle(records)
    with environment(path) as env, env.begin(write=True) as txn:
        for key, value in records:
            txn.put(key, value, append=order == "append")
    assert same(path) == 5000


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    environment(path).close()
    assert len(build_index(path)) == 0
    plain(path, [(b"a", b"b")])
    with environment(path) as env, env.begin(write=True) as txn:
        txn.delete(b"a")
    assert same(path) == 0


def test_folder_with_data_mdb(tmp_path: Path) -> None:
    with environment(tmp_path / "env", subdir=True) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    index = build_index(tmp_path / "env")
    assert contents(index) == [(b"key", b"value")]
    assert index.file == tmp_path / "env" / "data.mdb"


def test_named_databases_are_no_records_of_the_main_one(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    with environment(path) as env:
        for name, size in ((b"small", 10), (b"large", 5000), (b"none", 0)):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                for key, value in numbered(300 if size else 0, lambda n, size=size: size + n):
                    txn.put(key, value)
        with env.begin(write=True) as txn:
            txn.put(b"of the main one", b"x" * 4000)
    assert sorted(list_databases(path)) == [b"large", b"none", b"small"]
    assert contents(build_index(path)) == [(b"of the main one", b"x" * 4000)]
    assert [same(path, name) for name in (b"small", b"large", b"none")] == [300, 300, 0]
    with pytest.raises(DataError, match="no database 'other'; it has 'large', 'none', 'small'"):
        build_index(path, "other")


@pytest.mark.parametrize("values", [1, 2, 5, 3000])
@pytest.mark.parametrize("size", [None, 1, 3, 8, 200])
def test_several_values_of_a_key(tmp_path: Path, values: int, size: int | None) -> None:
    path = tmp_path / "a.mdb"
    chance = random.Random(values)
    with environment(path) as env:
        db = env.open_db(b"d", dupsort=True, dupfixed=size is not None)
        with env.begin(write=True, db=db) as txn:
            for key in (b"a", b"bb", b"ccc", b"dddd", b"e" * 31):
                for _ in range(chance.randrange(values, values + 3)):
                    txn.put(key, chance.randbytes(size or chance.randrange(1, 300)))
            txn.put(b"single", b"s" * (size or 7))
    assert same(path, b"d") >= 6 or values < 3
    with environment(path) as env:
        db = env.open_db(b"d", dupsort=True, dupfixed=size is not None)
        with env.begin(write=True, db=db) as txn, txn.cursor() as cursor:
            for at, _ in enumerate(list(cursor)):
                if at % 3 == 0 and cursor.first() and cursor.next():
                    cursor.delete()
    same(path, b"d")


def test_integer_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    with environment(path) as env:
        db = env.open_db(b"i", integerkey=True, dupsort=True, integerdup=True, dupfixed=True)
        with env.begin(write=True, db=db) as txn:
            for n in range(3000):
                txn.put(struct.pack("=Q", n % 40), struct.pack("=Q", n))
    assert same(path, b"i") == 3000


@pytest.mark.parametrize("size", [8192, 16384, 32768])
def test_page_sizes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.mdb"
    empty_file(path, size)
    plain(path, numbered(800, lambda n: (n * 7919) % 30_000))
    assert build_index(path).page_size == size
    assert same(path) == 800


def test_compacted_and_writemap(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.mdb", tmp_path / "copy"
    with environment(path, writemap=True) as env:
        for _ in range(3):
            with env.begin(write=True) as txn:
                for key, value in numbered(400, lambda n: n * 11):
                    txn.put(key, value)
        env.copy(str(copy), compact=True)
    assert same(path) == same(copy) == 400


NAMES = st.sampled_from([None, b"plain", b"dups", b"fixed"])
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 2100), st.integers(2000, 14_000))
ACTIONS = st.tuples(NAMES, st.integers(0, 60), st.integers(1, 90), SIZES, st.booleans())


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, max_size=25), st.integers(0, 2**20), st.sampled_from([4096, 16384]))
def test_any_history(actions: list[tuple], seed: int, page_size: int) -> None:
    """Puts, rewrites and deletes of ranges of keys, one transaction for each."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mdb"
        empty_file(path, page_size)
        with environment(path) as env:
            kinds = {None: {}, b"plain": {}, b"dups": {"dupsort": True}}
            kinds[b"fixed"] = {"dupsort": True, "dupfixed": True}
            for name, first, count, size, removes in actions:
                db = env.open_db(name, **kinds[name]) if name else None
                with env.begin(write=True, db=db) as txn:
                    for n in range(first, first + count):
                        key = b"%d" % n + b"k" * (n * 5 % 30)
                        if removes:
                            txn.delete(key)
                        elif name in (b"dups", b"fixed"):
                            for _ in range(size % 50):
                                txn.put(
                                    key, chance.randbytes(6 if name == b"fixed" else 1 + size % 90)
                                )
                        else:
                            txn.put(key, chance.randbytes(size))
        for name in (None, *list_databases(path)):
            same(path, name)
