"""One rank of a host reads for all: the same batches, nothing left behind, clear errors."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sapwood.data import LmdbReader, Stagger
from sapwood.errors import ConfigError, DataError, DeadlineError, PeerFailed
from sapwood.runtime.stores import HashStore, TCPStore
from sapwood.testing import ranks
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


def wait_after_two(path: str) -> str:
    reader = iter(LmdbReader(path, 40, share=True, epochs=None, timeout=20))
    for number, _ in enumerate(reader):
        if number == 1:
            ranks.mark("two")
            time.sleep(0.5 if ranks.rank() else 60)
    return "ended"


def test_when_the_rank_that_reads_is_killed_the_others_are_told(path: Path) -> None:
    with ranks.start(wait_after_two, 3, str(path)) as group:
        for rank in range(3):
            group.wait_mark("two", rank=rank, timeout=30)
        group.kill(0, signal.SIGKILL)
        outcomes = group.wait(timeout=30)
    for outcome in outcomes[1:]:
        assert "the rank of this host that reads for the others" in str(outcome.error)


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
