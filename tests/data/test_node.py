"""One rank of a host reads for all: the same batches, nothing left behind, clear errors."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from sapwood.data import LmdbReader, Stagger, skew_of
from sapwood.data.stagger import Gate
from sapwood.errors import ConfigError, DataError, DeadlineError, PeerFailed
from sapwood.runtime.stores import HashStore, TCPStore
from sapwood.testing import ranks
from sapwood.trace import open_trace
from sapwood.trace.read import read_trace
from tests.data.databases import numbered, plain, reference

Part = list[tuple[list[int], bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.mdb"
    plain(made, numbered(400, lambda n: 2500 + n % 3000))
    return made


def read(path: str, epochs: int = 1, **options: Any) -> tuple[Part, Any]:
    reader = LmdbReader(path, 40, seed=5, streams=4, window=500_000, epochs=epochs, **options)
    found = [(batch.index.tolist(), batch.data.tobytes()) for batch in reader]
    return found, reader.stats()


def same(parts: list[Part], path: Path, **options: Any) -> None:
    expected = reference(path)
    alone = LmdbReader(path, 40, seed=5, streams=4, window=500_000, rank=0, world=1, **options)
    number = -1
    for number, batch in enumerate(alone):
        together: list[int] = []
        for index, data in (part[number] for part in parts):
            assert data == b"".join(expected[one][1] for one in index)
            together += index
        assert together == batch.index.tolist()
    assert {len(part) for part in parts} == {number + 1}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("policy", "shuffle"),
    [("auto", "window"), ("lmm", "none"), ("lmm-dm", "none"), ("dio", "global"), ("coal", "reuse")],
)
def test_the_same_batches(path: Path, world: int, policy: str, shuffle: str) -> None:
    options = {"policy": policy, "shuffle": shuffle, "share": True, "epochs": 2}
    found = ranks.spawn(read, world, str(path), **options)
    same([part for part, _ in found], path, shuffle=shuffle, epochs=2)
    read_by = [stats.bytes_read for _, stats in found]
    assert read_by[0] > 0
    assert read_by[1:] == [0] * (world - 1)


def test_guessed_pages_are_counted(path: Path) -> None:
    _, stats = read(str(path), policy="lmm-dm", shuffle="none")
    assert stats.missed_pages + stats.redundant_pages > 0
    fixed = path.with_name("fixed.mdb")
    plain(fixed, numbered(400, lambda n: 3000), commit=1000)
    _, stats = read(str(fixed), policy="lmm-dm", shuffle="none")
    assert stats.missed_pages < 40
    with pytest.raises(ConfigError, match="needs shuffle='none'"):
        read(str(path), policy="lmm-dm", shuffle="window")


def read_slowly(path: str, stop: int, **options: Any) -> tuple[Part, float]:
    """Read, but let the ranks below ``stop`` wait until they are killed, when they read for all."""
    reader = LmdbReader(path, 40, seed=5, streams=4, window=500_000, share=True, **options)
    found = []
    for number, batch in enumerate(reader):
        found.append((batch.index.tolist(), batch.data.tobytes()))
        if number == 1 + 8 * ranks.rank() and ranks.rank() < stop:
            ranks.mark("waiting")
            time.sleep(60)
    return found, reader.stats().bytes_read


@pytest.mark.parametrize("policy", ["auto", "coal"])
@pytest.mark.parametrize("killed", [1, 2])
def test_when_the_rank_that_reads_is_killed_the_next_one_reads_on(
    path: Path, killed: int, policy: str
) -> None:
    """The ranks that are left get each batch they would have got."""
    options = {"epochs": 3, "timeout": 30, "policy": policy}
    with ranks.start(read_slowly, 4, str(path), killed, **options) as group:
        for rank in range(killed):
            group.wait_mark("waiting", rank=rank, timeout=30)
            group.kill(rank, signal.SIGKILL)
        outcomes = group.wait(timeout=60)
    expected = reference(path)
    alone = [
        LmdbReader(path, 40, seed=5, streams=4, window=500_000, epochs=3, rank=rank, world=4)
        for rank in range(4)
    ]
    for rank in range(killed, 4):
        found, read_bytes = outcomes[rank].value
        assert [index for index, _ in found] == [one.index.tolist() for one in alone[rank]]
        for index, data in found:
            assert data == b"".join(expected[one][1] for one in index)
        assert (read_bytes > 0) == (rank == killed)


def test_when_the_last_but_one_is_killed_the_last_reads_for_itself(path: Path) -> None:
    with ranks.start(read_slowly, 2, str(path), 1, timeout=30) as group:
        group.wait_mark("waiting", rank=0, timeout=30)
        group.kill(0, signal.SIGKILL)
        outcomes = group.wait(timeout=60)
    alone = LmdbReader(path, 40, seed=5, streams=4, window=500_000, rank=1, world=2)
    assert [index for index, _ in outcomes[1].value[0]] == [one.index.tolist() for one in alone]


def until_error(path: str) -> str:
    reader = LmdbReader(path, 40, share=True, epochs=None, timeout=1.0 if ranks.rank() else 20)
    try:
        for number, _ in enumerate(reader):
            if number == 1:
                ranks.mark("two")
    except DeadlineError as error:
        return str(error)
    return "no error"


def test_a_rank_that_reads_and_is_stopped_is_an_error_in_time(path: Path) -> None:
    """Whether it will ever go on cannot be known, so nobody takes its place."""
    with ranks.start(until_error, 3, str(path)) as group:
        for rank in range(3):
            group.wait_mark("two", rank=rank, timeout=30)
        group.kill(0, signal.SIGSTOP)
        outcomes = group.wait(timeout=30, ranks=[1, 2])
        group.kill(0, signal.SIGKILL)
    for outcome in outcomes:
        assert "gave no batch in 1 s: it is stopped, or further behind" in outcome.value


def until_late(path: str, timeout: float) -> str:
    """Read until somebody is late; what this rank says then."""
    reader = LmdbReader(path, 40, share=True, epochs=None, timeout=timeout)
    try:
        for number, _ in enumerate(reader):
            if number == 1:
                ranks.mark("two")
    except (DeadlineError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_follower_that_is_stopped_is_named(path: Path) -> None:
    """And not the rank that reads, which only waits for it like all the others."""
    with ranks.start(until_late, 3, str(path), 2.0) as group:
        for rank in range(3):
            group.wait_mark("two", rank=rank, timeout=30)
        group.kill(2, signal.SIGSTOP)
        outcomes = group.wait(timeout=30, ranks=[0, 1])
        group.kill(2, signal.SIGKILL)
    named = (
        r"DeadlineError: no batch in 2 s: rank 2 \(process \d+\) of this host has not taken "
        r"batch \d+ of this pass, and the others cannot go on without it: it is stopped"
    )
    # The first of the two leaves with its error. The other may be late to its own, and read on.
    reads_on = r".*the process with local rank 2 has not begun to read"
    said = [outcome.value for outcome in outcomes]
    assert any(re.match(named, text) for text in said), said
    assert all(re.match(f"{named}|{reads_on}", text) for text in said), said


def all_but_the_last(path: str) -> str:
    return "" if ranks.rank() == 2 else until_late(path, 0.8)


def test_a_follower_that_never_comes_is_named(path: Path) -> None:
    found = ranks.spawn(all_but_the_last, 3, str(path))
    for text in found[:2]:
        assert "the process with local rank 2 has not begun to read" in text


def leave_first(path: str) -> int:
    count = 0
    reader = LmdbReader(path, 40, share=True, timeout=20)
    for count, _ in enumerate(reader, start=1):
        if ranks.rank() == 0 and count == 2:
            break
    reader.close()
    return count


def test_the_rank_that_reads_may_leave_first(path: Path) -> None:
    assert ranks.spawn(leave_first, 3, str(path)) == [2, 10, 10]


def lag(path: str) -> float:
    """Ranks wait for each other after each batch, as in training, and the last one is slow."""
    from torch import distributed

    reader = LmdbReader(path, 40, share=True, timeout=20)
    for _ in reader:
        distributed.barrier()
        if ranks.rank() == 2:
            time.sleep(0.02)
    return reader.stats().skew_seconds


def test_skew_is_the_time_others_wait_for_the_slowest(path: Path) -> None:
    first, second, slow = ranks.spawn(lag, 3, str(path), init=True)
    assert slow < first
    assert slow < second
    assert 0.02 < first < 5


def test_skew_from_traces(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    for rank in range(2):
        trace = open_trace(folder / f"rank-{rank}.jsonl", rank=rank, world=2, run_id="r")
        assert len(list(LmdbReader(path, 40, rank=rank, world=2, trace=trace))) == 10
        trace.close()
    found = read_trace(folder)
    times = [[], []]
    for one in found.records:
        if one.name == "batch":
            assert one.args["batch"] == len(times[one.rank])
            times[one.rank].append(one.end - one.start)
    slowest = [max(pair) for pair in zip(*times, strict=True)]
    expected = {rank: (sum(slowest) - sum(times[rank])) / 1e9 for rank in range(2)}
    assert skew_of(found) == pytest.approx(expected)
    assert sum(skew_of(found).values()) > 0


def leave_early(path: str) -> int:
    reader = LmdbReader(path, 40, share=True, timeout=20)
    count = 0
    for count, _ in enumerate(reader, start=1):
        if ranks.rank() == 1 and count == 2:
            break
    reader.close()
    return count


def test_a_rank_that_leaves_does_not_hold_up_the_others(path: Path) -> None:
    assert ranks.spawn(leave_early, 3, str(path)) == [10, 2, 10]


def fail(path: str) -> str:
    reader = LmdbReader(path, 40, share=True, epochs=None, policy="coal", timeout=20)
    try:
        for number, _ in enumerate(reader):
            if number == 1 and ranks.rank() == 0:
                plain(Path(path), [(b"another", b"one")])
    except (DataError, PeerFailed) as error:
        return str(error)
    return "no error"


def test_a_changed_database_is_an_error_on_every_rank(path: Path) -> None:
    for text in ranks.spawn(fail, 2, str(path)):
        assert "changed while it was read" in text or "died or left" in text


def alone_of_two(path: str) -> str:
    if ranks.rank() == 1:
        return ""
    reader = LmdbReader(path, 40, share=True, timeout=0.5)
    try:
        next(iter(reader))
    except (DataError, DeadlineError) as error:
        return str(error)
    return "no error"


def test_a_rank_that_never_comes(path: Path) -> None:
    found = ranks.spawn(alone_of_two, 2, str(path))
    assert "not all ranks of this host began to read in time" in found[0] or "no batch" in found[0]


def staggered(path: str, size: int, adapt: int) -> tuple[Part, Any]:
    import os

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=20),
    )
    stagger = Stagger(store=store, size=size, adapt=adapt)
    return read(path, policy="stag", stagger=stagger, chunk=65_536, memory=400_000)


@pytest.mark.parametrize(("size", "adapt"), [(1, 0), (2, 0), (1, 3)])
def test_staggered(path: Path, size: int, adapt: int) -> None:
    found = ranks.spawn(staggered, 3, str(path), size, adapt)
    same([part for part, _ in found], path, chunk=65_536)
    assert all(stats.stagger_seconds > 0 for _, stats in found)


def test_staggering_alone_and_refusals(path: Path) -> None:
    found, _ = read(str(path), policy="stag", stagger=Stagger(store=HashStore()))
    same([found], path)
    with pytest.raises(ConfigError, match="policy='stag' needs stagger="):
        read(str(path), policy="stag")
    with pytest.raises(ConfigError, match="size=0"):
        Stagger(store=HashStore(), size=0)


@pytest.mark.parametrize("adapt", [0, 1])
def test_a_reader_that_does_not_take_its_turn_is_named_by_all(adapt: int) -> None:
    """Not the one before, which only waits for its own turn."""
    store, readers, said = HashStore(), 4, {}

    def go(number: int) -> None:
        stagger = Stagger(store=store, size=1, adapt=adapt)
        gate = Gate(stagger, "test", number=number, readers=readers, timeout=1.0)
        try:
            for batch in range(3):
                if (number, batch) == (1, 1):
                    return
                gate.release(batch, 1000)
        except DeadlineError as error:
            said[number] = str(error)
        finally:
            gate.leave()

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(go, range(readers)))
    # With more than one at a time the others may not need it, as reader 0 finds by measuring.
    assert ({3} if adapt else {2, 3}) <= set(said)
    for text in said.values():
        assert re.match(r"reader 1 has not read its part of batch [12] for 1 s", text)


@pytest.mark.parametrize(("size", "adapt"), [(1, 0), (2, 0), (3, 5), (1, 1)])
def test_the_store_of_the_turns_does_not_grow(size: int, adapt: int) -> None:
    """Four readers, of which some skip some batches; never do more read than may."""
    store, readers, batches = HashStore(), 4, 60
    reading, most, lock = 0, 0, Lock()

    def go(number: int) -> None:
        nonlocal reading, most
        gate = Gate(
            Stagger(store=store, size=size, adapt=adapt),
            "test",
            number=number,
            readers=readers,
            timeout=20,
        )
        for batch in range(batches):
            for _ in range(2 if (batch + number) % 3 else 0):  # as with a batch in two parts
                gate.admit(batch)
            with lock:
                reading += (batch + number) % 3 > 0
                most = max(most, reading)
            time.sleep(0.0005)
            with lock:
                reading -= (batch + number) % 3 > 0
            gate.release(batch, 1000)
        gate.leave()

    with ThreadPoolExecutor(readers) as pool:
        for done in [pool.submit(go, number) for number in range(readers)]:
            done.result(60)
    assert 1 <= most <= (size if not adapt else readers)
    periods = batches // adapt if adapt else 0
    assert store.num_keys() <= periods + readers  # the last ones let nobody in
