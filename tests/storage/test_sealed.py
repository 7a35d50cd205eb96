"""Memory that a keeper is given, or fills in place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sapwood.buffers import HandoverPool
from sapwood.errors import AlreadyThere, BadKey, NoRoom, StorageError, Truncated
from sapwood.storage import Wanted
from sapwood.storage.memory import MemoryKeeper

LARGE = os.urandom(300_000)


@pytest.fixture
def keeper() -> Iterator[MemoryKeeper]:
    with MemoryKeeper(limit=1_000_000, pool=HandoverPool(label="test")) as made:
        yield made


def sealed(data: bytes) -> int:
    with HandoverPool(policy="on_demand", label="test") as pool:
        memory = pool.take(len(data))
        memory.bytes[:] = memoryview(data)
        return memory.seal()


def test_sealed_memory_becomes_an_object(keeper: MemoryKeeper) -> None:
    keeper.keep("a", sealed(LARGE))
    assert keeper.get("a") == LARGE
    mapped = keeper.map("a", writable=True)
    mapped.data[0] ^= 1
    out = bytearray(1000)
    keeper.read([Wanted("a", 0, out)])
    assert out == LARGE[:1000]
    for _ in range(5):  # the room of those that are refused is given back
        with pytest.raises(AlreadyThere):
            keeper.keep("a", sealed(LARGE))
    keeper.keep("b", sealed(LARGE))
    keeper.keep("c", sealed(LARGE))
    with pytest.raises(NoRoom):
        keeper.keep("d", sealed(LARGE))
    keeper.remove(["a"])
    keeper.keep("d", sealed(LARGE))


def test_what_is_not_sealed_is_refused_and_closed(keeper: MemoryKeeper) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    with pytest.raises(StorageError, match="sealed"):
        keeper.keep("a", fd)
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(BadKey):
        keeper.keep("../a", sealed(LARGE))
    assert list(keeper.list()) == []


def test_a_draft_is_filled_in_place(keeper: MemoryKeeper) -> None:
    with keeper.begin("a", len(LARGE)) as draft:
        memory = draft.direct()  # type: ignore[attr-defined]
        memory[:] = LARGE
        del memory
        draft.publish()
    assert keeper.get("a") == LARGE
    with keeper.begin("b", len(LARGE)) as draft:
        assert draft.direct() is not None  # type: ignore[attr-defined]
    with keeper.begin("c", 100) as draft:
        assert draft.direct() is None  # type: ignore[attr-defined]
    assert [entry.key for entry in keeper.list()] == ["a"]
    keeper.put("b", [LARGE])
    keeper.put("c", [LARGE])


def test_a_draft_from_the_pool_is_written_in_parts(keeper: MemoryKeeper) -> None:
    with keeper.begin("a", len(LARGE)) as draft:
        draft.write(LARGE[:5])
        draft.write_parts([LARGE[5:5], LARGE[5:77_777], LARGE[77_777:]])
        draft.publish()
    assert keeper.get("a") == LARGE
    with keeper.begin("b", len(LARGE)) as draft:
        draft.write(LARGE[:5])
        with pytest.raises(Truncated):
            draft.publish()
