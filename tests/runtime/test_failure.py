"""The board where failing ranks leave word, and the store behind it that may not answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import pytest

from sapwood.errors import DeadlineError
from sapwood.runtime.bounded import BoundedStore
from sapwood.runtime.failure import FailureBoard
from sapwood.runtime.stores import HashStore

WORLD = 4


@pytest.fixture
def stores() -> Iterator[list[BoundedStore]]:
    shared = HashStore()
    each = [BoundedStore(shared, 5.0, ranks=WORLD) for _ in range(WORLD)]
    yield each
    for one in each:
        one.close()


@pytest.fixture
def boards(stores: list[BoundedStore]) -> list[FailureBoard]:
    return [FailureBoard(store, rank) for rank, store in enumerate(stores)]


def test_only_the_first_failure_is_kept(boards: list[FailureBoard]) -> None:
    assert boards[0].read(1) is None
    boards[2].post("ValueError: first")
    boards[1].post("PeerFailed: second")
    for reader in (boards[0], boards[1], boards[3]):
        failure = reader.read(1)
        assert failure is not None
        assert failure.rank == 2
        assert str(failure) == "rank 2 failed: ValueError: first"
    assert boards[2].read(1) is None, "one's own failure is no news"


def test_who_only_saw_a_failure_is_not_blamed_for_it(boards: list[FailureBoard]) -> None:
    boards[1].post("lost another rank", own=False)
    failure = boards[0].read(1)
    assert failure is not None
    assert failure.rank is None
    assert str(failure) == "rank 1 reports: lost another rank"


def test_a_long_message_is_cut(boards: list[FailureBoard]) -> None:
    boards[1].post("x" * 100_000)
    assert 1000 < len(str(boards[0].read(1))) < 5000


def test_the_rank_that_left_earliest_is_the_one_missed(boards: list[FailureBoard]) -> None:
    boards[1].leave(5)
    boards[2].leave(3)
    boards[3].leave(4)
    assert boards[0].read(3) is None, "all did step 3"
    failure = boards[0].read(4)
    assert failure is not None
    assert failure.rank == 2
    assert "after 3 steps" in str(failure)
    assert "same number of batches" in str(failure)
    assert boards[2].read(4) is None


def test_lingering_ends_when_all_know_and_never_late(boards: list[FailureBoard]) -> None:
    boards[0].post("ValueError: x")
    for reader in boards[1:]:
        assert reader.read(1) is not None
        assert reader.read(1) is not None, "reading twice counts once"
    start = time.monotonic()
    boards[0].linger(WORLD, 60.0)
    assert time.monotonic() - start < 30
    boards[0].linger(WORLD + 1, 0.05)
    assert time.monotonic() - start < 30


def test_a_dead_store_is_a_failure_and_hurts_nobody(stores: list[BoundedStore]) -> None:
    board = FailureBoard(stores[0], 0)
    stores[0].close()
    failure = board.read(1)
    assert failure is not None
    assert "store is gone" in str(failure)
    board.post("x")
    board.leave(1)
    board.linger(2, 1.0)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    seen: list[type[BaseException]] = []

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen.append(kind)

    monkeypatch.setattr(sys, "excepthook", hook)
    return seen


def test_an_uncaught_exception_is_posted(
    boards: list[FailureBoard], hooked: list[type[BaseException]]
) -> None:
    before = sys.excepthook
    boards[1].watch_uncaught()
    error = ZeroDivisionError("by nought")
    sys.excepthook(type(error), error, None)
    assert hooked == [ZeroDivisionError], "the previous hook is still called"
    assert boards[1].uncaught is error
    assert "ZeroDivisionError: by nought" in str(boards[0].read(1))
    boards[1].unwatch()
    assert sys.excepthook is before


def test_hooks_of_two_groups_end_in_any_order(
    boards: list[FailureBoard], hooked: list[type[BaseException]]
) -> None:
    boards[1].watch_uncaught()
    boards[2].watch_uncaught()
    boards[1].unwatch()
    boards[2].unwatch()
    error = ValueError("later")
    sys.excepthook(type(error), error, None)
    assert hooked == [ValueError]
    assert boards[1].uncaught is None
    assert boards[0].read(1) is None


class StuckStore:
    """A store whose host is stopped until ``resume``; ``check`` asks the host, ``set`` counts."""

    def __init__(self) -> None:
        self.resume = threading.Event()
        self.written: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.resume.wait(30)
        return True

    def set(self, key: str, text: str) -> None:
        self.written.append(key)

    def get(self, key: str) -> bytes:
        raise KeyError(key)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    stuck = StuckStore()
    store = BoundedStore(stuck, 0.1, ranks=2)  # type: ignore[arg-type]
    board = FailureBoard(store, 1)
    try:
        with pytest.raises(DeadlineError, match=r"not answered for 0\.1 s"):
            store.has("a")
        assert store.wait("a", 0.05) is False
        with pytest.raises(DeadlineError):
            store.set("late", "x")
        assert board.read(1) is None, "silence is not news"
        stuck.resume.set()
        assert store.has("a", timeout=30.0)
        assert stuck.written == [], "what was given up must not happen afterwards"
        store.set("now", "x")
        assert stuck.written == ["now"]
        with pytest.raises(KeyError):
            store.get("nothing")
    finally:
        stuck.resume.set()
        store.close()


def test_closing_does_not_wait_for_a_stopped_host() -> None:
    stuck = StuckStore()
    store = BoundedStore(stuck, 0.05, ranks=2)  # type: ignore[arg-type]
    try:
        with pytest.raises(DeadlineError):
            store.has("a")
        start = time.monotonic()
        store.close()
        assert time.monotonic() - start < 20
    finally:
        stuck.resume.set()
