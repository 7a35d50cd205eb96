"""Damaged databases end in a named error or in right bytes: no crash, no hang, no wrong bytes."""

from __future__ import annotations

import os
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood.data import LmdbReader, pagefile
from sapwood.data.free import free_pages
from sapwood.data.index import Index, build_index, list_databases
from sapwood.errors import DataError
from tests.data.databases import contents, environment, numbered, plain, reference

PAGE = 4096


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inline and overflow values, branches, free pages, a named and a dupsort database."""
    path = tmp_path_factory.mktemp("good") / "a.mdb"
    plain(path, numbered(300, lambda n: 6000 if n % 3 else 90), 40)
    with environment(path) as env:
        db = env.open_db(b"dups", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for n in range(400):
                txn.put(b"k%d" % (n % 3 if n % 2 else n % 40), b"value %d" % n)
    return path


def changed(good: Path, change: Callable[[bytearray], None], folder: Path) -> Path:
    raw = bytearray(good.read_bytes())
    change(raw)
    path = folder / "bad.mdb"
    path.write_bytes(raw)
    return path


def put(form: str, at: int, value: int) -> Callable[[bytearray], None]:
    return lambda raw: struct.pack_into(form, raw, at, value)


def meta_page(path: Path) -> int:
    return build_index(path).fingerprint.txnid % 2


def a_leaf(index: Index) -> int:
    return int(index.key_offsets[0]) // PAGE


@pytest.mark.parametrize("inside", [0, 1, 15, 2000, 4095])
def test_truncated_anywhere(good: Path, tmp_path: Path, inside: int) -> None:
    index = build_index(good)
    whole = contents(index)
    ends = int(max((index.offsets + index.lengths).max(), index.key_offsets.max()))
    raw = good.read_bytes()
    path = tmp_path / "bad.mdb"
    for page in range(len(raw) // PAGE):
        path.write_bytes(raw[: page * PAGE + inside])
        if page * PAGE + inside < ends:
            with pytest.raises(DataError, match="page"):
                build_index(path)
        else:
            try:
                assert contents(build_index(path)) == whole
            except DataError as error:
                assert "page" in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("<I", 16, 0x12345678), "page 0: expected LMDB's mark 0xbeefc0de .* found 0x12345678"),
        (put(">I", 16, 0xBEEFC0DE), "page 0: .* big-endian"),
        (put("<I", 20, 2), "page 0: expected LMDB data version 1, found 2"),
        (put("<I", 20, 999), "page 0: expected LMDB data version 1, found 999"),
        (put("<I", 40, 3000), "page 0: expected a page size .* found 3000"),
        (put("<I", 40, 0), "page 0: expected a page size .* found 0"),
        (put("<I", 40, 8192), "page 1"),
        (put("<I", PAGE + 16, 1), "page 1: expected a meta page"),
        (put("<H", PAGE + 10, 2), "page 1: expected a meta page"),
        (put("<Q", PAGE + 144, 2**60 + 1), "pages 0 and 1: .* follow each other"),
    ],
)
def test_meta_pages(good: Path, tmp_path: Path, change, says: str) -> None:
    with pytest.raises(DataError, match=says):
        build_index(changed(good, change, tmp_path))


@pytest.mark.parametrize("behind", [3, 5, 9])
def test_a_meta_page_that_is_several_transactions_behind(tmp_path: Path, behind: int) -> None:
    """As after a crash without syncs, if only one had reached the disk; LMDB opens it."""
    path = tmp_path / "a.mdb"
    plain(path, numbered(100, lambda n: 90), commit=10)
    old = path.read_bytes()[: 2 * PAGE]
    more = numbered(100 + 10 * behind, lambda n: 90)[100:]
    plain(path, more, commit=10)
    newest = build_index(path).fingerprint.txnid
    with path.open("r+b") as file:
        stale = (newest - 1) % 2 * PAGE
        file.seek(stale)
        file.write(old[stale : stale + PAGE])
    index = build_index(path, thorough=True)
    assert index.fingerprint.txnid == newest
    assert contents(index) == reference(path)
    assert len(index) == 100 + 10 * behind
    assert sum(len(one) for one in LmdbReader(path, 16, tail="keep")) == len(index)


def test_other_kinds_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for head, says in (
        (bytes(12) + struct.pack("<II", 0xBEEFC0DE, 1), "32-bit"),
        (bytes(24) + struct.pack("<II", 0xBEEFC0DE, 2), "data version 1, found 2"),
        (b"SQLite format 3\0" * 20, "mark"),
    ):
        path.write_bytes(head.ljust(2 * PAGE, b"\0"))
        with pytest.raises(DataError, match=says):
            build_index(path)


@pytest.mark.parametrize(
    ("at", "form", "value", "says"),
    [
        (40, "<Q", 10**6, "a root among the pages"),
        (6, "<H", 0, "depth 0"),
        (6, "<H", 33, "at most 32 levels, found 33"),
        (6, "<H", 65535, "at most 32 levels"),
        (8, "<Q", 77, "expected 77 branch pages"),
        (16, "<Q", 2**63, "leaf pages"),
        (24, "<Q", 1, "at most 1 overflow pages"),
        (32, "<Q", 12, "expected 12 records"),
        (40, "<Q", 2**62, "expected a root among the pages"),
        (40, "<Q", 0, "page 0"),
        (40, "<Q", 2**64 - 1, "none of them"),
    ],
)
def test_the_main_database_in_the_meta_page(
    good: Path, tmp_path: Path, at: int, form: str, value: int, says: str
) -> None:
    start = meta_page(good) * PAGE + 16 + 24 + 48
    with pytest.raises(DataError, match=says):
        build_index(changed(good, put(form, start + at, value), tmp_path))


@pytest.mark.parametrize(
    ("at", "form", "value", "says"),
    [
        (0, "<Q", 5, "its own number"),
        (10, "<H", 1, "page flags 0x2"),
        (10, "<H", 4, "page flags 0x2"),
        (12, "<H", 16, "at least one node"),
        (12, "<H", 4095, "even 'lower'"),
        (12, "<H", 65534, "'lower' <= 'upper'"),
        (14, "<H", 65535, "'lower' <= 'upper'"),
        (16, "<H", 3, "node pointers"),
        (16, "<H", 4094, "node pointers"),
    ],
)
def test_leaves(good: Path, tmp_path: Path, at: int, form: str, value: int, says: str) -> None:
    leaf = a_leaf(build_index(good))
    with pytest.raises(DataError, match=f"page {leaf}: expected .*{says}"):
        build_index(changed(good, put(form, leaf * PAGE + at, value), tmp_path))


def test_pages_that_lead_in_circles(good: Path, tmp_path: Path) -> None:
    index = build_index(good)
    root, leaf = index.fingerprint.root, a_leaf(index)
    raw = good.read_bytes()
    nodes = struct.unpack_from("<2H", raw, root * PAGE + 16)
    for child, says in ((root, "page flags 0x2"), (leaf, "used twice"), (2**20, "to lie from 2")):
        node = root * PAGE + nodes[1]
        with pytest.raises(DataError, match=says):
            build_index(changed(good, put("<I", node, child), tmp_path))
    deep = meta_page(good) * PAGE + 16 + 24 + 48 + 6

    def all_to_the_root(raw: bytearray) -> None:
        struct.pack_into("<H", raw, deep, 30)
        count = (struct.unpack_from("<H", raw, root * PAGE + 12)[0] - 16) // 2
        for node in struct.unpack_from(f"<{count}H", raw, root * PAGE + 16):
            struct.pack_into("<I", raw, root * PAGE + node, root)

    with pytest.raises(DataError, match="circle"):
        build_index(changed(good, all_to_the_root, tmp_path))


def test_values_with_pages_of_their_own(good: Path, tmp_path: Path) -> None:
    index = build_index(good)
    first, second = index.overflow.nonzero()[0][:2]
    page, other = (int(index.offsets[n]) // PAGE for n in (first, second))
    pointer = int(index.key_offsets[first] + index.key_lengths[first])
    for value, says in (
        (other, f"page {other}: expected it to be used once"),
        (a_leaf(index), "used once"),
        (2**63 + 5, "expected pages"),
        (1, "page 1: expected pages 1 to 2 to lie from 2"),
    ):
        with pytest.raises(DataError, match=says):
            build_index(changed(good, put("<Q", pointer, value), tmp_path))
    size = int(index.key_offsets[first]) - 8
    with pytest.raises(DataError, match="page"):
        build_index(changed(good, put("<I", size, 2**32 - 1), tmp_path))
    for at, form in ((0, "<Q"), (10, "<H"), (12, "<I")):
        bad = changed(good, put(form, page * PAGE + at, 1), tmp_path)
        assert len(build_index(bad)) == len(index)
        with pytest.raises(DataError, match=f"page {page}: expected"):
            build_index(bad, thorough=True)


def test_a_value_in_a_free_page(good: Path, tmp_path: Path) -> None:
    with pagefile.open_pages(good) as file:
        free = free_pages(file)
    index = build_index(good)
    assert len(free)
    small = int(index.overflow.nonzero()[0][0])
    pointer = int(index.key_offsets[small] + index.key_lengths[small])
    pairs = [n for n in free.tolist() if n + 1 in free] or [int(free[0])]
    with pytest.raises(DataError, match=r"free pages|used once"):
        build_index(changed(good, put("<Q", pointer, pairs[0]), tmp_path))


def test_unreadable_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, tmp_path / "a\0b", Path(os.devnull)):
        with pytest.raises(DataError):
            build_index(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="expected a file"):
        build_index(tmp_path / "pipe")


def test_changed_while_it_is_read(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(good, lambda raw: None, tmp_path)
    read = pagefile.PageFile.batches

    def interrupted(self, numbers):
        yield from read(self, numbers)
        monkeypatch.undo()
        plain(path, [(b"one", b"more")])

    monkeypatch.setattr(pagefile.PageFile, "batches", interrupted)
    with pytest.raises(DataError, match="changed while it was read"):
        build_index(path)
    build_index(path)


def every_outcome(raw: bytes) -> None:
    """Walk everything there is; anything but a DataError is a fault."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mdb"
        path.write_bytes(raw)
        try:
            names = [None, *list_databases(path)]
        except DataError:
            names = [None]
        for name in names:
            try:
                index = build_index(path, name, thorough=True)
            except DataError:
                continue
            assert (index.offsets + index.lengths <= len(raw)).all()
            assert (index.key_offsets + index.key_lengths <= len(raw)).all()


CHANGES = st.lists(
    st.tuples(st.integers(0, 2**31), st.integers(0, 4096), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES, seed=st.integers(0, 2**20))
def test_any_bytes_anywhere(good: Path, changes, seed: int) -> None:
    """Bytes overwritten, mostly in the pages of trees, and pages put in the place of others."""
    raw = bytearray(good.read_bytes())
    index, chance = build_index(good), random.Random(seed)
    trees = [0, 1, index.fingerprint.root, *set((index.key_offsets // PAGE).tolist())]
    trees += [int(n) // PAGE for n in build_index(good, "dups").offsets[::50]]
    for which, at, content in changes:
        start = trees[which % len(trees)] * PAGE + (at % 200 if which % 2 else at)
        start = min(start, len(raw) - len(content))
        raw[start : start + len(content)] = content
    if chance.random() < 0.3:
        a, b = (chance.choice(trees) * PAGE for _ in range(2))
        raw[a : a + PAGE] = raw[b : b + PAGE]
    every_outcome(bytes(raw))
