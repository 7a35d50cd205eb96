from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import sapwood
from sapwood.events import RunStopping
from sapwood.runtime import signals
from sapwood.testing import ranks

BOTH = (signal.SIGTERM, signal.SIGUSR1)


def make_run(**options) -> sapwood.Run:
    model = nn.Linear(2, 2)
    return sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.fixture(autouse=True)
def usual_handlers():
    before = {number: signal.getsignal(number) for number in BOTH}
    yield
    assert {number: signal.getsignal(number) for number in BOTH} == before


def test_handlers_are_there_while_a_run_is_and_not_longer():
    before = [signal.getsignal(number) for number in BOTH]
    with make_run():
        assert [signal.getsignal(number) for number in BOTH] == [signals._handle] * 2
    assert [signal.getsignal(number) for number in BOTH] == before


def test_none_are_installed_when_none_are_wanted():
    with make_run(stop_signals=None):
        assert signal.getsignal(signal.SIGTERM) is not signals._handle
    with make_run(stop_signals="usr1"):
        assert signal.getsignal(signal.SIGTERM) is not signals._handle
        assert signal.getsignal(signal.SIGUSR1) is signals._handle


@pytest.mark.parametrize("name", ["SIGKILL", "SIGFOO", "SIG_DFL", "9"])
def test_what_is_no_signal_is_refused(name):
    with pytest.raises(sapwood.SapwoodError, match=r"stop_signals has .*such as SIGTERM"):
        make_run(stop_signals=(name,))


def test_two_listeners_may_end_in_any_order():
    heard: list[str] = []
    first = signals.listen([signal.SIGUSR1], lambda name: heard.append(f"1 {name}"))
    second = signals.listen([signal.SIGUSR1], lambda name: heard.append(f"2 {name}"))
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["2 SIGUSR1"]
    second.close()


def test_a_handler_that_was_there_is_called_too_and_comes_back():
    called: list[int] = []
    mine = lambda number, frame: called.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with make_run() as run:
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == [signal.SIGTERM]
            assert run.stopping
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_hooks_later_keeps_its_handler():
    before = signal.getsignal(signal.SIGTERM)
    run = make_run()
    later = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    run.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with make_run() as run:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not run.stopping
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN


def test_a_handler_of_another_language_is_left_alone(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            with make_run() as run:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert not run.stopping
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert "test_signals.py" in (tmp_path / "stacks").read_text()


def test_outside_the_main_thread_it_says_what_cannot_be(caplog):
    caplog.set_level(logging.WARNING)

    def work() -> None:
        with make_run() as run:
            run.model(torch.ones(1, 2)).sum().backward()
            run.step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert "not made in the main thread, so SIGTERM, SIGUSR1 cannot stop it" in caplog.text


def test_a_run_closed_by_another_thread_leaves_signals_as_they_were():
    before = signal.getsignal(signal.SIGUSR1)
    run = make_run()
    thread = threading.Thread(target=run.close)
    thread.start()
    thread.join(30)
    # Only the main thread may change handlers; with nobody listening ours does what others would.
    called: list[int] = []
    signals._before[signal.SIGUSR1] = lambda number, frame: called.append(number)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert called == [signal.SIGUSR1]
    for number in BOTH:
        signal.signal(number, before)


def sleeper() -> None:
    time.sleep(600)


def in_a_rank() -> list[int | None]:
    """A forked child must end when it is told to, also in the moment it begins."""
    with make_run() as run:
        codes = []
        for _ in range(20):
            child = multiprocessing.get_context("fork").Process(target=sleeper)
            child.start()
            child.terminate()
            child.join(10)
            codes.append(child.exitcode)
            child.kill()
        assert not run.stopping
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    return codes


def test_a_forked_child_ends_as_usual():
    assert ranks.spawn(in_a_rank, 1) == [[-signal.SIGTERM] * 20]


def wait_for_a_second() -> None:
    signals._SAME = 0.0
    run = make_run()
    run.events.subscribe(RunStopping, lambda event: linger())
    os.kill(os.getpid(), signal.SIGTERM)
    run.model(torch.ones(1, 2)).sum().backward()
    run.step()


def linger() -> None:
    ranks.mark("saving")
    time.sleep(600)


def test_a_second_signal_ends_it_at_once():
    with ranks.start(wait_for_a_second, 1) as group:
        group.wait_mark("saving", 0)
        group.kill(0, signal.SIGTERM)
        (outcome,) = group.wait(30)
    assert outcome.signal == signal.SIGTERM
