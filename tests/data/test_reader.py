"""The reader gives what py-lmdb gives, in the order that was asked for, on any number of ranks."""

from __future__ import annotations

import math
import os
import pickle
import struct
import sys
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.data import Batch, LmdbReader, Reuse, memory
from sapwood.data.engines.ring import Cache, Ring
from sapwood.data.report import readings_of
from sapwood.data.stats import Recorder
from sapwood.errors import ConfigError, DataError, UsageError
from sapwood.testing import ranks
from sapwood.trace import open_trace
from sapwood.trace.read import read_trace
from tests.data.databases import empty_file, environment, numbered, plain, reference

KINDS = {
    "inline": lambda n: 40 + n % 60,
    "one page": lambda n: 3000,
    "large": lambda n: 20_000 + n,
    "mixed": lambda n: (n * 7919) % 9000,
    "empty": lambda n: 0,
}
POLICIES = ["auto", "lmdb", "dio", "coal"]
SHUFFLES = ["none", "window", "global", "reuse"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("databases")
    for kind, size in KINDS.items():
        plain(made / kind, numbered(300, size), commit=40)
    with environment(made / "several") as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for n in range(300):
                txn.put(b"%d" % (n % 7), b"%05d" % n)
        with env.begin(write=True) as txn:
            for key, value in numbered(100, lambda n: 2500):
                txn.put(key, value)
    return made


def check(batch: Batch, expected: list[tuple[bytes, bytes]]) -> None:
    wanted = [expected[one] for one in batch.index.tolist()]
    assert [bytes(one) for one in batch.records] == [value for _, value in wanted]
    assert batch.keys == [key for key, _ in wanted]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_as_py_lmdb(folder: Path, kind: str, shuffle: Any, policy: Any) -> None:
    expected = reference(folder / kind)
    reader = LmdbReader(
        folder / kind, 16, shuffle=shuffle, policy=policy, tail="keep", window=200_000, streams=4
    )
    seen = []
    for batch in reader:
        check(batch, expected)
        seen += batch.index.tolist()
    assert sorted(seen) == sorted(list(range(300)) * (2 if shuffle == "reuse" else 1))
    stats = reader.stats()
    assert (stats.batches, stats.samples) == (len(reader), len(seen))
    assert stats.bytes_useful == sum(len(expected[one][1]) for one in seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [None, "d"])
def test_named_databases_and_several_values(folder: Path, name: str | None, policy: Any) -> None:
    expected = reference(folder / "several", name.encode() if name else None)
    reader = LmdbReader(
        folder / "several", 7, database=name, shuffle="none", tail="keep", policy=policy
    )
    for batch in reader:
        check(batch, expected)
    if name is not None and policy == "lmdb":
        with pytest.raises(ConfigError, match="cannot shuffle a database whose keys have several"):
            next(iter(LmdbReader(folder / "several", 7, database=name, policy=policy)))


def put(path: Path, pairs: Any, *, name: bytes | None = b"x", **flags: bool) -> None:
    with environment(path) as env:
        db = env.open_db(name, **flags)
        with env.begin(write=True, db=db) as txn:
            for key, value in pairs:
                txn.put(key, value)


def integer(number: int) -> bytes:
    return struct.pack("=Q", number)


def other_pages(path: Path) -> None:
    empty_file(path, 16_384)
    put(path, numbered(300, lambda n: (n * 7919) % 30_000))


def compacted(path: Path) -> None:
    put(path, reversed(numbered(300, lambda n: n * 11)))
    with environment(path) as env:
        env.copy(str(path) + ".copy", compact=True)
    Path(str(path) + ".copy").replace(path)


def churned(path: Path) -> None:
    for turn in range(4):
        put(path, numbered(300, lambda n, turn=turn: (n * 7919 + turn * 999) % 5000, seed=turn))
        with environment(path) as env, env.begin(write=True, db=env.open_db(b"x")) as txn:
            for n in range(turn, 300, 5):
                txn.delete(f"{n:08d}".encode())


MAKERS = {
    "integer keys": lambda path: put(
        path, [(integer(n * 7 % 300), b"%d" % n) for n in range(300)], integerkey=True
    ),
    "several values": lambda path: put(
        path, [(b"%d" % (n % 3), b"%d" % n * (n % 9 + 1)) for n in range(2000)], dupsort=True
    ),
    "several of one size": lambda path: put(
        path, [(b"%d" % (n % 3), b"%06d" % n) for n in range(2000)], dupsort=True, dupfixed=True
    ),
    "integers of integers": lambda path: put(
        path,
        [(integer(n % 40), integer(n)) for n in range(2000)],
        dupsort=True, dupfixed=True, integerkey=True, integerdup=True,
    ),
    "keys from the end": lambda path: put(
        path, numbered(300, lambda n: 2500 + n), reverse_key=True
    ),
    "other pages": other_pages,
    "compacted": compacted,
    "churned": churned,
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_database_gives_the_same_bytes_as_py_lmdb(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.mdb"
    MAKERS[kind](path)
    expected = reference(path, b"x")
    assert len(expected) > 200
    for policy, shuffle in product(["auto", "dio", "coal", "lmdb"], ["none", "window", "global"]):
        if policy == "lmdb" and shuffle != "none":
            continue  # where keys have several values that is refused
        reader = LmdbReader(
            path, 37, database="x", policy=policy, shuffle=shuffle, tail="keep", window=100_000
        )
        seen: list[int] = []
        for batch in reader:
            check(batch, expected)
            seen += batch.index.tolist()
        assert sorted(seen) == list(range(len(expected)))


@pytest.mark.parametrize(("kind", "chunk", "room"), [("large", 4096, 1), ("mixed", 8192, 40_000)])
@pytest.mark.parametrize("shuffle", ["window", "global"])
def test_rings_smaller_than_a_batch(
    folder: Path, kind: str, chunk: int, room: int, shuffle: Any
) -> None:
    """Records longer than a buffer, and batches that need more chunks than there is room for."""
    expected = reference(folder / kind)
    reader = LmdbReader(
        folder / kind, 32, shuffle=shuffle, policy="coal", chunk=chunk, memory=max(room, 4096)
    )
    for batch in reader:
        check(batch, expected)


def peak(path: str, policy: Any, shuffle: Any, window: int, batch: int = 64) -> int:
    """By how many bytes reading a whole database raises the memory of a process."""
    reader = LmdbReader(
        path,
        batch,
        policy=policy,
        shuffle=shuffle,
        memory=4 * 2**20,
        chunk=2**18,
        window=window,
        epochs=2,
        reuse=Reuse(factor=4) if shuffle == "reuse" else None,
    )
    memory.available = lambda: 4096  # so that the file does not fit
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = resident("VmRSS:")
    assert sum(len(batch) for batch in reader) >= 16_000
    return resident("VmHWM:") - before


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) * 1024 for one in lines if one.startswith(what))


@pytest.mark.parametrize(
    ("policy", "shuffle"), [("auto", "window"), ("coal", "window"), ("coal", "reuse")]
)
def test_memory_stays_within_what_was_given(tmp_path: Path, policy: str, shuffle: str) -> None:
    plain(tmp_path / "a.mdb", numbered(8000, lambda n: 3000), commit=4000)
    assert (tmp_path / "a.mdb").stat().st_size > 31 * 2**20
    (found,) = ranks.spawn(peak, 1, str(tmp_path / "a.mdb"), policy, shuffle, 2**20)
    assert found < 10 * 2**20


def test_memory_stays_within_what_was_given_when_small_records_are_reused(tmp_path: Path) -> None:
    """A window has many of these, and their orders must not pile up."""
    plain(tmp_path / "a.mdb", numbered(300_000, lambda n: 60), commit=300_000)
    (found,) = ranks.spawn(peak, 1, str(tmp_path / "a.mdb"), "coal", "reuse", 3 * 2**20, 4096)
    assert found < 14 * 2**20


def test_reading_ahead_reads_everything_about_once(folder: Path) -> None:
    size = (folder / "one page").stat().st_size
    for shuffle in ("none", "window"):
        reader = LmdbReader(
            folder / "one page", 16, shuffle=shuffle, policy="coal", chunk=65_536, streams=2
        )
        assert sum(len(batch) for batch in reader) == 304
        stats = reader.stats()
        assert 300 * 3000 < stats.bytes_read <= size
        assert stats.requests == sum(stats.sizes.values()) <= size // 65_536 + 1
        assert stats.useful > 0.6
        assert max(stats.sizes) <= 131_072


@pytest.mark.parametrize(("kind", "world"), [("one page", 4), ("large", 3), ("mixed", 2)])
def test_ranks_in_the_order_of_keys_read_their_own_only(
    tmp_path: Path, kind: str, world: int
) -> None:
    plain(tmp_path / "db", numbered(300, KINDS[kind]))
    expected = reference(tmp_path / "db")
    seen, read, useful = [], 0, 0
    for rank in range(world):
        reader = LmdbReader(
            tmp_path / "db", 50, shuffle="none", policy="coal", rank=rank, world=world, epochs=2
        )
        for batch in reader:
            check(batch, expected)
            seen += batch.index.tolist()
        stats = reader.stats()
        read, useful = read + stats.bytes_read, useful + stats.bytes_useful
        reader.close()
    assert sorted(seen) == sorted(2 * list(range(300)))
    # Pages hold more than records, and a part of a batch need not begin with one.
    assert read <= 1.5 * useful + 2 * 6 * world * 2 * 4096


def indices(reader: LmdbReader) -> list[list[int]]:
    return [batch.index.tolist() for batch in reader]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resume_at_every_batch_on_any_number_of_ranks(folder: Path, shuffle: Any) -> None:
    """What came before the stop, on some ranks, and after it, on others, is one epoch."""

    def make(rank: int = 0, world: int = 1) -> LmdbReader:
        return LmdbReader(
            folder / "inline", 23, shuffle=shuffle, rank=rank, world=world, epochs=2, streams=4,
            window=2000, seed=3, chunk=4096,
        )  # fmt: skip

    whole = indices(make())
    assert len(whole) == len(make())
    first, states = make(), []
    for _ in first:
        states.append(first.state_dict())
    expected = reference(folder / "inline")
    # After the last batch there is nothing left of this pass: then the next one begins.
    for (done, state), world in product(enumerate(states[:-1], start=1), range(1, 5)):
        assert len(pickle.dumps(state)) < 500
        parts = []
        # All of the rest for some, the next ones for most: the suite has to end.
        count = len(whole) - done if done % 9 == 0 else min(2, len(whole) - done)
        for rank in range(world):
            reader = make(rank, world)
            reader.load_state_dict(state)
            parts.append(list(islice(reader, count)))
            reader.close()
        together = list(zip(*parts, strict=True))
        assert len(together) == count
        for batch, records in zip(together, whole[done:], strict=False):
            assert list(chain(*(part.index.tolist() for part in batch))) == records
            data = b"".join(part.data.tobytes() for part in batch)
            assert data == b"".join(expected[one][1] for one in records)


def test_a_loop_that_is_gone_on_with_is_as_long_as_is_asked_now(folder: Path) -> None:
    """A training that is resumed with more epochs has more epochs, and not those of before."""
    whole = indices(LmdbReader(folder / "inline", 50, seed=1, epochs=6))
    states = {}
    for epochs in (2, 4, None):
        reader = LmdbReader(folder / "inline", 50, seed=1, epochs=epochs)
        for done, _ in enumerate(islice(reader, 12), start=1):
            states[epochs, done] = reader.state_dict()
        reader.close()
    for (before, done, now), last in {
        (2, 3, 4): 24,
        (2, 8, 6): 36,
        (2, 8, 1): 12,
        (4, 8, 2): 12,
        (4, 8, 1): 12,
        (None, 8, 2): 18,
        (2, 12, 4): 36,  # the loop had ended: the next one begins
    }.items():
        reader = LmdbReader(folder / "inline", 50, seed=1, epochs=now)
        reader.load_state_dict(states[before, done])
        assert indices(reader) == whole[done:last], (before, done, now)
    reader = LmdbReader(folder / "inline", 50, seed=1, epochs=None)
    reader.load_state_dict(states[2, 8])
    assert [one.index.tolist() for one in islice(reader, 28)] == whole[8:36]
    reader.close()
    old = {name: value for name, value in states[2, 8].items() if name != "epochs"}
    reader = LmdbReader(folder / "inline", 50, seed=1, epochs=4)
    reader.load_state_dict(old)  # of a release that did not say
    assert indices(reader) == whole[8:12]


def test_a_loop_goes_on_where_the_last_one_stopped(folder: Path) -> None:
    reader = LmdbReader(folder / "inline", 50, seed=1)
    whole = indices(LmdbReader(folder / "inline", 50, seed=1, epochs=3))
    found = [batch.index.tolist() for batch in islice(reader, 2)]
    found += indices(reader)
    assert (reader.epoch, len(found)) == (1, 6)
    found += indices(reader)
    reader.set_epoch(2)
    assert found + indices(reader) == whole
    reader.set_epoch(0)
    assert indices(reader) == whole[:6]


def test_without_end(folder: Path) -> None:
    reader = LmdbReader(folder / "inline", 100, epochs=None, shuffle="none")
    found = [batch.index.tolist() for batch in islice(reader, 7)]
    assert found[6] == found[0] == list(range(100))
    assert reader.state_dict()["epoch"] == 2
    with pytest.raises(TypeError, match="no end"):
        len(reader)
    reader.close()


def test_states_of_other_orders_are_refused(folder: Path) -> None:
    state = LmdbReader(folder / "inline", 10).state_dict()
    with pytest.raises(ConfigError, match="batch_size was 10 and is 20"):
        LmdbReader(folder / "inline", 20).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        LmdbReader(folder / "inline", 10, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="the layout of the file was"):
        LmdbReader(folder / "mixed", 10).load_state_dict(state)
    with pytest.raises(ConfigError, match="not the state of a reader"):
        LmdbReader(folder / "inline", 10).load_state_dict({"epoch": 3})
    with pytest.raises(ConfigError, match="has version 7, expected 1"):
        LmdbReader(folder / "inline", 10).load_state_dict({**state, "version": 7})


def test_tensors_and_decoding(folder: Path) -> None:
    expected = reference(folder / "one page")
    reader = LmdbReader(folder / "one page", 8, decode=lambda batch: (batch.index, batch.tensor))
    index, tensor = next(iter(reader))
    assert tensor.shape == (8, 3000)
    assert tensor.dtype == torch.uint8
    assert tensor[3].numpy().tobytes() == expected[index[3]][1]
    tensor += 1  # the batch's own memory
    batch = next(iter(LmdbReader(folder / "mixed", 8)))
    with pytest.raises(UsageError, match=r"batch\.tensor needs records of one length"):
        _ = batch.tensor
    reader.close()


def test_batches_can_be_pickled(folder: Path) -> None:
    batch = next(iter(LmdbReader(folder / "mixed", 8)))
    check(pickle.loads(pickle.dumps(batch)), reference(folder / "mixed"))
    assert [bytes(one) for one in batch] == [bytes(batch[n]) for n in range(len(batch))]


def test_a_pickled_reader_goes_on(folder: Path) -> None:
    reader = LmdbReader(folder / "inline", 50, seed=1)
    next(iter(reader))
    copy = pickle.loads(pickle.dumps(reader))
    assert indices(copy) == indices(reader)


def rank_work(path: str, policy: str) -> list[tuple[list[int], bytes]]:
    reader = LmdbReader(path, 30, seed=5, policy=policy, streams=6, window=300_000)
    return [(batch.index.tolist(), batch.data.tobytes()) for batch in reader]


@pytest.mark.parametrize("policy", ["auto", "coal"])
@pytest.mark.parametrize("world", [2, 3])
def test_on_ranks(folder: Path, world: int, policy: Any) -> None:
    expected = reference(folder / "one page")
    parts = ranks.spawn(rank_work, world, str(folder / "one page"), policy)
    alone = LmdbReader(folder / "one page", 30, seed=5, streams=6, window=300_000)
    for number, batch in enumerate(alone):
        mine = [part[number] for part in parts]
        assert list(chain(*(index for index, _ in mine))) == batch.index.tolist()
        assert b"".join(data for _, data in mine) == b"".join(
            expected[one][1] for one in batch.index.tolist()
        )
    assert number + 1 == len(alone) == len(parts[0])


@pytest.mark.parametrize("policy", ["auto", "dio", "coal"])
def test_a_database_changed_meanwhile_is_noticed(tmp_path: Path, policy: Any) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(200, lambda n: 3000))
    batches = iter(LmdbReader(path, 10, policy=policy))
    next(batches)
    plain(path, [(b"another", b"one")])
    with pytest.raises(DataError, match=r"a\.mdb: the database was changed while it was read"):
        for _ in batches:
            pass
    with pytest.raises(StopIteration):
        next(batches)
    assert sum(len(batch) for batch in LmdbReader(path, 10, policy=policy, tail="keep")) == 201


@pytest.mark.parametrize("policy", ["dio", "coal"])
def test_a_file_that_was_cut_off_is_noticed(tmp_path: Path, policy: Any) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(200, lambda n: 3000))
    batches = iter(LmdbReader(path, 10, policy=policy, memory=200_000, chunk=65_536))
    next(batches)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"cut off|was changed"):
        for _ in batches:
            pass


@pytest.mark.parametrize("shuffle", ["window", "global"])
def test_auto_when_the_file_does_not_fit(
    folder: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 4096)
    expected = reference(folder / "one page")
    reader = LmdbReader(folder / "one page", 20, shuffle=shuffle)
    for batch in reader:
        check(batch, expected)
    assert (max(reader.stats().sizes) > 2**16) == (shuffle == "window")


def test_auto_reads_a_cold_file_once_and_then_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    plain(path, numbered(500, lambda n: 3000))
    cold(path)
    expected = reference_of(500)
    reader = LmdbReader(path, 50, epochs=2, shuffle="global", chunk=65_536)
    for batch in reader:
        assert [bytes(one) for one in batch] == [expected[n] for n in batch.index.tolist()]
    assert reader.stats().samples == 1000


def cold(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize(("pace", "used"), [(2.0**31, "Ring"), (2.0**29, "Cache")])
def test_auto_fills_the_page_cache_only_if_the_training_waits(
    tmp_path: Path, pace: float, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch passes by it in any case; after that it depends on the disk."""
    path, homes, choosing = tmp_path / "a.mdb", [], sys.modules["sapwood.data.engines.choose"]
    plain(path, numbered(500, lambda n: 3000))
    for home in (Ring, Cache):
        noted = lambda job, home=home: homes.append(home.__name__) or home(job)  # noqa: E731
        monkeypatch.setattr(choosing, home.__name__, noted)
    monkeypatch.setattr(Recorder, "pace", lambda self: pace if homes else math.inf)
    expected = reference_of(500)
    reader = LmdbReader(path, 50, chunk=65_536, window=2**18)
    for _ in range(2):
        cold(path)
        for batch in reader:
            assert [bytes(one) for one in batch] == [expected[n] for n in batch.index.tolist()]
    if not homes:
        pytest.skip("this file system keeps its files in memory")
    assert homes == ["Ring", used]


def reference_of(count: int) -> list[bytes]:
    return [value for _, value in numbered(count, lambda n: 3000)]


def test_the_trace_tells_what_was_read(folder: Path, tmp_path: Path) -> None:
    with_trace = open_trace(tmp_path / "trace" / "rank-0.jsonl", rank=0, world=1, run_id="r")
    reader = LmdbReader(folder / "one page", 30, policy="coal", chunk=65_536, trace=with_trace)
    assert len(indices(reader)) == 10
    with_trace.close()
    records = list(read_trace(tmp_path / "trace").records)
    assert {"read", "data bytes read", "data read"} <= {one.name for one in records}
    sums = next(one for one in records if one.name == "data read").args
    assert sums["batches"] == 10
    assert sums["bytes_read"] == reader.stats().bytes_read


def test_the_trace_of_several_ranks_says_what_each_read(folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        with_trace = open_trace(
            tmp_path / "trace" / f"rank-{rank}.jsonl", rank=rank, world=2, run_id="r"
        )
        reader = LmdbReader(folder / "one page", 30, rank=rank, world=2, trace=with_trace)
        batches = iter(reader)
        for _ in range(4):
            next(batches)
        assert readings_of(read_trace(tmp_path / "trace")) == [] or rank == 1
        reader.close()  # in the middle of an epoch
        reader.close()
        with_trace.close()
    first, second = readings_of(read_trace(tmp_path / "trace"))
    assert (first.rank, second.rank) == (0, 1)
    assert first.file == second.file == reader.path
    assert first.stats.samples == second.stats.samples == 60
    assert first.stats.bytes_useful == 60 * 3000
    assert sum(second.stats.sizes.values()) == second.stats.requests > 0
    assert first.stats.skew_seconds + second.stats.skew_seconds > 0


def test_refusals(folder: Path, tmp_path: Path) -> None:
    path = folder / "inline"
    for wrong, message in (
        ({"rank": 1}, "rank=1, world=None: give both"),
        ({"rank": 2, "world": 2}, "expected a rank from 0 to world - 1"),
        ({"rank": 0, "world": 20}, "batch_size=10 is the batch of all 20 ranks"),
        ({"rank": 0, "world": 2, "share": True}, "known from the launcher only"),
        ({"epochs": 0}, "epochs=0: expected 1 or more"),
        ({"policy": "fast"}, "policy='fast': expected one of auto, lmdb"),
        ({"reuse": Reuse()}, "reuse= is for shuffle='reuse', and that is 'window'"),
        ({"streams": 0}, "streams=0"),
        ({"memory": 5}, "memory=5: expected 4096 or more"),
        ({"threads": 0}, "threads=0: expected 1"),
        ({"timeout": 0}, "timeout=0: expected more than 0"),
        ({"chunk": 100}, "chunk=100: expected a multiple"),
        ({"shuffle": "some"}, "shuffle='some': expected one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            LmdbReader(path, 10, **wrong)
    environment(tmp_path / "none").close()
    with pytest.raises(DataError, match="no records"):
        LmdbReader(tmp_path / "none", 10)
    with pytest.raises(DataError, match="cannot be opened"):
        LmdbReader(tmp_path / "missing", 10)
