"""All ranks agree on the same step to come, whoever asks and whenever, and nobody passes it."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.errors import PeerFailed
from sapwood.runtime.agreed import AgreedStep

POLL = 0.005


class Store:
    """A group's store, in memory."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def has(self, key: str, **_: Any) -> bool:
        return key in self._texts

    def get(self, key: str, **_: Any) -> bytes:
        return self._texts[key].encode()

    def add(self, key: str, amount: int, **_: Any) -> int:
        with self._lock:
            self._texts[key] = str(int(self._texts.get(key, "0")) + amount)
            return int(self._texts[key])

    def compare_set(self, key: str, expected: str, text: str, **_: Any) -> bytes:
        with self._lock:
            if self._texts.get(key, "") == expected:
                self._texts[key] = text
            return self._texts[key].encode()

    def wait(self, key: str, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.has(key) and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.has(key)


class Board:
    def __init__(self) -> None:
        self.failure: Exception | None = None

    def read(self, step: int) -> Exception | None:
        return self.failure


class Group:
    def __init__(self, rank: int, world: int, store: Store) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.timeout, self.step, self.failed = 10.0, 0, False
        self.board = Board()

    def check_peers(self, what: str) -> None:
        if self.board.failure is not None:
            raise self.board.failure

    def silent(self, what: str) -> PeerFailed:
        return PeerFailed(f"silent while {what}")


def agreed(rank: int, world: int, store: Store, **options: Any) -> AgreedStep:
    made: Any = Group(rank, world, store)
    return AgreedStep(made, "k", what="testing", poll=POLL, **options)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_in_lockstep_agree_whoever_asks(seed: int) -> None:
    world, rounds = 3, 3
    chance = random.Random(seed)
    store = Store()
    # A collective: nobody ends a step before all have come to it.
    meeting = threading.Barrier(world)
    found: list[list[int]] = [[] for _ in range(world)]
    asks = {(chance.randrange(world), r): chance.randrange(1, 20) for r in range(rounds)}
    pauses = [[chance.random() * 0.002 for _ in range(30)] for _ in range(world)]
    ahead = chance.choice([0, 4])

    def train(rank: int) -> None:
        mine = agreed(rank, world, store, ahead=lambda: ahead)
        step = 0
        for round in range(rounds):
            since = 0
            while True:
                meeting.wait(10)
                step, since = step + 1, since + 1
                time.sleep(pauses[rank][step % 30])
                if asks.get((rank, round)) == since:
                    mine.ask(f"rank {rank}")
                if mine.reach() == 0:
                    break
                if since > 2000:
                    raise AssertionError("nobody agreed")
            found[rank].append(step)
            assert mine.reason
            mine.renew()
        mine.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == rounds


def test_alone_the_next_step_is_the_one() -> None:
    mine = agreed(0, 1, Store())
    assert [mine.reach(), mine.reach()] == [None, None]
    mine.ask("me")
    assert mine.reach() == 0
    mine.renew()
    assert mine.reach() is None
    assert mine.reason is None
    mine.close()


def test_steps_ahead_are_counted_down() -> None:
    mine = agreed(0, 1, Store(), ahead=lambda: 2)
    mine.ask("me")
    assert [mine.reach() for _ in range(4)] == [2, 1, 0, 0]
    mine.close()


def test_a_rank_that_ends_frees_those_that_wait_for_its_promise() -> None:
    store = Store()
    told = threading.Event()
    left, stays = agreed(0, 2, store), agreed(1, 2, store, hopeless=told.set)
    left.close()
    stays.ask("late")
    deadline = time.monotonic() + 10
    while stays._promise is None and time.monotonic() < deadline:
        time.sleep(POLL)
    assert stays.reach() is None
    assert told.wait(10)
    stays.close()


def test_a_failed_group_is_not_waited_for_and_is_told() -> None:
    told = threading.Event()
    mine = agreed(0, 2, Store(), hopeless=told.set)
    mine.ask("signal")
    mine._group.board.failure = PeerFailed("rank 1 failed")  # type: ignore[attr-defined]
    assert told.wait(10)
    assert mine.reach() is None
    mine.close()


def test_a_rank_that_never_promises_is_an_error_in_time() -> None:
    made: Any = Group(0, 2, Store())
    mine = AgreedStep(made, "k", what="testing", poll=POLL, timeout=0.2)
    mine.ask("signal")
    deadline = time.monotonic() + 10
    while mine._promise is None and time.monotonic() < deadline:
        time.sleep(POLL)
    with pytest.raises(PeerFailed, match="silent while testing"):
        mine.reach()
    mine.close()


def test_a_reason_of_its_own_is_looked_for() -> None:
    due = SimpleNamespace(now=False)
    mine = agreed(0, 1, Store(), when=lambda: "time" if due.now else None)
    assert mine.reach() is None
    due.now = True
    assert mine.reach() == 0
    assert mine.reason == "time"
    mine.close()
