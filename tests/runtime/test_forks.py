"""Forking while other threads hold locks."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sapwood.runtime import forks
from sapwood.runtime.forks import ForkLock


def _child_can_hold(lock: ForkLock) -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if lock.held(5) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_waits_for_threads_that_hold_it() -> None:
    lock, holding = ForkLock(), threading.Event()
    steps = []

    def hold() -> None:
        with lock:
            steps.append("begun")
            holding.set()
            time.sleep(0.2)
            steps.append("ended")

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(10)
    child = os.fork()
    if not child:
        os._exit(0 if steps == ["begun", "ended"] and lock.held(5) else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_locks_that_are_taken_in_another_order_are_no_deadlock() -> None:
    one, other = ForkLock(), ForkLock()
    over = threading.Event()

    def hold(first: ForkLock, second: ForkLock) -> None:
        while not over.is_set():
            with first, second:
                time.sleep(0.001)

    thread = threading.Thread(target=hold, args=(one, other))
    thread.start()
    try:
        assert all(_child_can_hold(lock) for lock in (one, other) for _ in range(3))
    finally:
        over.set()
        thread.join()


def test_a_lock_that_is_not_let_go_is_free_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", 0.1)
    lock, holding, over = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(10)
    try:
        assert _child_can_hold(lock)
        assert not lock.held(0.01)  # in the parent it is as it was
    finally:
        over.set()
        thread.join()
    assert _child_can_hold(lock)


def test_who_forks_while_holding_it_still_holds_it() -> None:
    lock = ForkLock()
    with lock:
        assert _child_can_hold(lock)
    assert _child_can_hold(lock)
