"""Memory that is filled, sealed and given away."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from sapwood.buffers import FaultCount, HandoverPool
from sapwood.buffers.handover import copy_to, is_sealed
from sapwood.errors import ConfigError, NoRoom, UsageError

MIB = 2**20


@pytest.fixture(params=["preallocated", "on_demand"])
def pool(request: pytest.FixtureRequest) -> Iterator[HandoverPool]:
    with HandoverPool(policy=request.param, ready=64 * MIB, label="test") as made:
        yield made


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 2 * MIB, 3 * MIB + 5])
def test_what_is_sealed_has_the_bytes_and_cannot_be_changed(
    pool: HandoverPool, nbytes: int
) -> None:
    for _ in range(3):  # made now, and ahead
        memory = pool.take(nbytes)
        memory.bytes[:] = 7
        fd = memory.seal()
        try:
            assert is_sealed(fd)
            assert os.fstat(fd).st_size == nbytes
            assert os.pread(fd, nbytes + 1, 0) == b"\7" * nbytes
            with pytest.raises(OSError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(OSError):
                os.ftruncate(fd, nbytes + 1)
            if nbytes:
                with pytest.raises(OSError):
                    mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        with pytest.raises(UsageError):
            memory.seal()
        with pytest.raises(UsageError):
            _ = memory.bytes


def test_memory_that_is_viewed_is_not_sealed(pool: HandoverPool) -> None:
    memory = pool.take(100)
    view = memory.bytes
    with pytest.raises(UsageError, match="still maps"):
        memory.seal()
    assert len(view) == 100
    memory.close()


def test_memory_of_a_size_is_ready_the_next_time() -> None:
    with HandoverPool(ready=64 * MIB, label="test") as pool:
        pool.take(20 * MIB).close()
        pool.prepare(20 * MIB)
        assert pool.stats().ready == 20 * MIB
        with FaultCount() as faults, pool.take(19 * MIB) as memory:
            memory.bytes[:] = 1
        assert faults.minor < 100
        assert (pool.stats().ahead, pool.stats().late) == (20 * MIB, 20 * MIB)
        # Too large a part of it would be for nothing.
        pool.prepare(20 * MIB)
        pool.take(10 * MIB).close()
        assert pool.stats().late == 30 * MIB


def test_what_is_ready_has_a_limit() -> None:
    with HandoverPool(ready=8 * MIB, label="test") as pool:
        for size in (16, 2, 4, 6):
            pool.prepare(size * MIB)
        assert pool.stats().ready <= 8 * MIB
    assert pool.stats().ready == 0
    pool.close()
    with pytest.raises(UsageError):
        pool.take(1)


def test_sources_go_to_their_places(pool: HandoverPool) -> None:
    sources = [bytes([n]) * size for n, size in enumerate((1, 7, 12_288, 100_003), 1)]
    starts = [0, 64, 129, 20_008]
    memory = pool.take(200_000)
    copy_to(memory, starts, sources)
    for start, source in zip(starts, sources, strict=True):
        assert bytes(memory.bytes[start : start + len(source)]) == source
    with pytest.raises(UsageError, match="beyond"):
        copy_to(memory, [199_999], [b"xx"])
    with pytest.raises(UsageError, match="beyond"):
        copy_to(memory, [-1], [b"x"])
    os.close(memory.seal())


def test_a_fork_does_not_keep_it_from_being_sealed(pool: HandoverPool) -> None:
    memory = pool.take(MIB)
    memory.bytes[:] = 1
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        os.close(memory.seal())
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_many_threads_take_at_once(pool: HandoverPool) -> None:
    def use() -> None:
        for _ in range(5):
            memory = pool.take(2 * MIB)
            memory.bytes[:] = 1
            os.close(memory.seal())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_more_than_the_machine_has_is_refused(pool: HandoverPool) -> None:
    with pytest.raises(NoRoom, match="do not fit"):
        pool.take(2**50)
    with pytest.raises(ConfigError, match="on_demand"):
        HandoverPool(policy="never")
