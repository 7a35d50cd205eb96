"""Jobs run in order; the first error stops them and reaches the owner."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest

from sapwood.errors import DeadlineError, UsageError
from sapwood.runtime.worker import Worker

SOON = 30.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Jobs that wait for it are let go at the end, whatever the test did."""
    event = threading.Event()
    yield event
    event.set()


def fail() -> None:
    raise ValueError("broken job")


def test_jobs_run_in_order_on_the_workers_thread() -> None:
    worker = Worker("test-worker")
    seen: list[tuple[int, str]] = []
    for number in range(100):
        worker.submit(lambda n=number: seen.append((n, threading.current_thread().name)))
    worker.drain(SOON)
    assert seen == [(n, "test-worker") for n in range(100)]
    assert worker.error is None
    assert worker.close()


def test_an_error_stops_later_jobs_and_is_raised_to_the_owner(gate: threading.Event) -> None:
    told: list[tuple[BaseException, str]] = []
    worker = Worker(
        "test-worker", on_error=lambda e: told.append((e, threading.current_thread().name))
    )
    seen: list[str] = []
    worker.submit(lambda: gate.wait(SOON) and None)
    worker.submit(fail)
    worker.submit(lambda: seen.append("after"))
    gate.set()
    with pytest.raises(ValueError, match="broken job") as caught:
        worker.drain(SOON)
    with pytest.raises(ValueError, match="broken job"):
        worker.submit(lambda: seen.append("later"))
    with pytest.raises(ValueError, match="broken job"):
        worker.check()
    assert worker.close(), "closing cleans up and does not raise"
    assert worker.error is caught.value
    assert told == [(caught.value, "test-worker")]
    assert seen == []


def test_an_on_error_that_fails_does_not_hide_the_jobs_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def worse(error: BaseException) -> None:
        raise OSError("cannot tell")

    worker = Worker("test-worker", on_error=worse)
    with caplog.at_level(logging.ERROR):
        worker.submit(fail)
        with pytest.raises(ValueError, match="broken job"):
            worker.drain(SOON)
    assert worker.close()
    assert "on_error raised" in caplog.text


def test_draining_has_a_deadline(gate: threading.Event) -> None:
    worker = Worker("test-worker")
    worker.submit(lambda: gate.wait(SOON) and None)
    worker.submit(lambda: None)
    with pytest.raises(DeadlineError, match=r"test-worker still had 2 jobs after 0\.02 s"):
        worker.drain(0.02)
    assert worker.close(timeout=0.02) is False, "the job is not done yet"
    gate.set()
    assert worker.close(SOON)


def test_draining_nothing_is_done_at_once() -> None:
    worker = Worker("test-worker")
    worker.drain(0.0)
    assert worker.close()


def test_closing_does_the_jobs_it_has_and_takes_no_more() -> None:
    worker = Worker("test-closing")
    seen: list[int] = []
    for number in range(10):
        worker.submit(lambda n=number: seen.append(n))
    assert worker.close(SOON)
    assert seen == list(range(10))
    assert "test-closing" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(UsageError, match="test-closing is closed"):
        worker.submit(lambda: None)
    assert worker.close(), "closing again does nothing"


def test_a_job_is_let_go_when_it_is_done() -> None:
    class Big:
        def run(self) -> None:
            pass

    worker = Worker("test-worker")
    big = Big()
    gone = weakref.ref(big)
    worker.submit(big.run)
    worker.drain(SOON)
    del big
    assert worker.close()
    assert gone() is None
