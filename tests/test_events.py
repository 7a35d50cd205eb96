"""Holds, fences and the bus: who waits for whom, who is called when, and what becomes of errors."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from sapwood.errors import FenceTimeout, SubscriberError, UsageError
from sapwood.events import EventBus, Fence, StepEnded, TensorUpdated

SOON = 30.0


@dataclass(frozen=True)
class Ping:
    number: int = 0


@dataclass(frozen=True)
class Pong:
    pass


# -- fences ----------------------------------------------------------------------------------


def test_a_fence_nobody_holds_does_not_wait() -> None:
    fence = Fence("bucket 0 of step 1")
    with fence.hold("early"):
        pass
    assert fence.close(SOON) == {}


def test_closing_waits_for_each_hold_and_says_whom_it_waited_for() -> None:
    fence = Fence("bucket 0 of step 1")
    first, second = fence.hold("checkpoint"), fence.hold("clone")
    fence.hold("quick").release()
    timers = [threading.Timer(0.1, first.release), threading.Timer(0.2, second.release)]
    for timer in timers:
        timer.start()
    waited = fence.close(SOON)
    assert first.released
    assert second.released
    assert waited.keys() == {"checkpoint", "clone"}
    assert 0.0 < sum(waited.values()) < SOON
    for timer in timers:
        timer.join()


def test_holds_of_one_owner_are_added_up() -> None:
    fence = Fence("b")
    holds = [fence.hold("clone", assist=lambda: time.sleep(0.02)) for _ in range(2)]
    released = threading.Timer(0.05, lambda: [one.release() for one in holds])
    released.start()
    assert fence.close(SOON).keys() == {"clone"}
    released.join()


def test_the_waiter_does_the_owners_work() -> None:
    fence = Fence("b")
    seen: list[int] = []

    def assist() -> None:
        seen.append(threading.get_ident())
        hold.release()

    hold = fence.hold("checkpoint", assist)
    done = fence.hold("done", lambda: seen.append(-1))
    done.release()
    assert fence.close(SOON).keys() == {"checkpoint"}
    assert seen == [threading.get_ident()], "a released hold needs no help"


def test_an_owner_that_never_releases_is_named() -> None:
    fence = Fence("bucket 7 of step 3")
    quick, stuck = fence.hold("quick"), fence.hold("lazy clone")
    quick.release()
    with pytest.raises(FenceTimeout, match="'lazy clone' has held bucket 7 of step 3 for more"):
        fence.close(0.02)
    with pytest.raises(FenceTimeout, match="fence_timeout"):
        fence.close(0.02)  # a second try must not run over the hold either
    stuck.release()
    assert fence.close(0.02) == {}


def test_the_timeout_is_for_all_holds_together() -> None:
    fence = Fence("b")
    holds = [fence.hold(f"owner {n}", assist=lambda: time.sleep(0.06)) for n in range(20)]
    start = time.monotonic()
    with pytest.raises(FenceTimeout):
        fence.close(0.05)
    assert time.monotonic() - start < 0.06 * 20
    assert not any(one.released for one in holds)


def test_help_that_fails_is_the_owners_error() -> None:
    fence = Fence("bucket 2")

    def assist() -> None:
        raise OSError("disk full")

    fence.hold("checkpoint", assist)
    with pytest.raises(SubscriberError, match=r"'checkpoint' holds bucket 2 .*disk full") as caught:
        fence.close(SOON)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_hold_comes_too_late_once_the_update_began() -> None:
    fence = Fence("bucket 1 of step 2")
    fence.close(SOON)
    with pytest.raises(UsageError, match=r"'late' asked to hold bucket 1 of step 2 .*callback"):
        fence.hold("late")


def test_an_event_hands_out_holds_on_its_fence() -> None:
    fence = Fence("b")
    event = TensorUpdated(step=1, bucket=0, tensors=(), fence=fence)
    hold = event.hold("mine")
    assert hold.wait(0.01) is False
    hold.release()
    hold.release()
    assert hold.wait(0.01) is True
    assert event.names == ()


# -- the bus ---------------------------------------------------------------------------------


def test_subscribers_are_called_in_their_order_on_the_publishing_thread() -> None:
    bus = EventBus()
    seen: list[tuple[str, int]] = []
    for name in "abc":
        bus.subscribe(Ping, lambda event, n=name: seen.append((n, threading.get_ident())))
    bus.publish(Ping())
    here = threading.get_ident()
    assert seen == [("a", here), ("b", here), ("c", here)]


def test_only_the_kind_asked_for_arrives() -> None:
    bus = EventBus()
    seen: list[object] = []
    assert not bus.wants(Ping)
    subscription = bus.subscribe(Ping, seen.append)
    assert bus.wants(Ping)
    assert not bus.wants(Pong)
    bus.publish(Pong())
    bus.publish(Ping(1))
    subscription.cancel()
    subscription.cancel()
    assert not bus.wants(Ping)
    bus.publish(Ping(2))
    assert seen == [Ping(1)]
    assert bus.subscriptions() == ()


def test_who_is_cancelled_during_an_event_does_not_get_it() -> None:
    bus = EventBus()
    seen: list[str] = []

    def first(event: Ping) -> None:
        seen.append("first")
        second.cancel()
        bus.subscribe(Ping, lambda event: seen.append("third"))

    bus.subscribe(Ping, first)
    second = bus.subscribe(Ping, lambda event: seen.append("second"))
    bus.publish(Ping())
    assert seen == ["first"], "and who subscribed during it begins with the next"
    bus.publish(Ping())
    assert seen == ["first", "first", "third"]


def test_an_exception_is_kept_raised_once_and_hurts_nobody_else() -> None:
    bus = EventBus()
    seen: list[object] = []

    def bad(event: StepEnded) -> None:
        raise ValueError("no space")

    bus.subscribe(StepEnded, bad, name="checkpoint")
    bus.subscribe(StepEnded, seen.append)
    bus.raise_pending()
    bus.publish(StepEnded(step=1))
    assert len(seen) == 1
    with pytest.raises(SubscriberError) as caught:
        bus.raise_pending()
    assert str(caught.value) == (
        "the subscriber 'checkpoint' of StepEnded raised ValueError: no space"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    bus.raise_pending()


def test_the_first_of_several_exceptions_is_told_with_their_number() -> None:
    bus = EventBus()

    def bad(event: Ping) -> None:
        raise ValueError(f"number {event.number}")

    bus.subscribe(Ping, bad)
    for number in range(3):
        bus.publish(Ping(number))
    with pytest.raises(SubscriberError, match=r"bad.*number 0 \(and 2 more\)"):
        bus.raise_pending()
    bus.raise_pending()


def test_a_request_to_end_is_not_kept() -> None:
    bus = EventBus()

    def end(event: Ping) -> None:
        raise KeyboardInterrupt

    bus.subscribe(Ping, end)
    with pytest.raises(KeyboardInterrupt):
        bus.publish(Ping())
    bus.raise_pending()


def test_time_and_calls_are_attributed() -> None:
    bus = EventBus()
    slow = bus.subscribe(Ping, lambda event: time.sleep(0.02), name="slow")
    idle = bus.subscribe(Pong, lambda event: None, name="idle")
    for _ in range(3):
        bus.publish(Ping())
    assert slow.calls == 3
    assert slow.seconds >= 0.05
    assert (idle.calls, idle.seconds) == (0, 0.0)
    assert {one.name for one in bus.subscriptions()} == {"slow", "idle"}


def test_threads_may_subscribe_publish_and_cancel_at_once() -> None:
    bus = EventBus()
    counter = bus.subscribe(Ping, lambda event: None, name="counter")

    def fail(event: Ping) -> None:
        raise ValueError

    bus.subscribe(Ping, fail, name="failing")
    start = threading.Barrier(6)

    def publish() -> None:
        start.wait(SOON)
        for _ in range(300):
            bus.publish(Ping())

    def churn() -> None:
        start.wait(SOON)
        for _ in range(300):
            bus.subscribe(Ping, lambda event: None).cancel()
            bus.subscriptions()

    threads = [threading.Thread(target=work) for work in [publish] * 4 + [churn] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert counter.calls == 1200
    with pytest.raises(SubscriberError, match="and 1199 more"):
        bus.raise_pending()
    assert len(bus.subscriptions()) == 2
