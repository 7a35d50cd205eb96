"""A donor in a fork: what goes wrong there is no concern of the training's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.clone import donor as donor_module
from sapwood.clone.address import Address
from sapwood.clone.departure import Departure
from sapwood.clone.listener import ask
from sapwood.clone.manifest import versions
from sapwood.clone.places import Places
from sapwood.clone.remote import RemoteBoard
from sapwood.clone.sender import Sender
from sapwood.clone.serving import Serving
from sapwood.clone.session import Session
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, ConfigError
from tests.clone.forking import until

LONG = 20.0
"""Nothing here takes so long, unless it waits for what does not come."""


class StuckSession:
    """The board is on a machine that does not answer."""

    name = "a fork"

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.told: list[str] = []

    def check(self) -> None:
        pass

    def fail(self, why: str) -> None:
        assert self.answers.wait(LONG)
        self.told.append(why)

    def close(self) -> None:
        pass


class Link:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Hold:
    """A claim on a bucket."""

    def __init__(self) -> None:
        self.assist: Callable[[], None] | None = None
        self.released = False

    def release(self) -> None:
        self.released = True


class Updated:
    """A bucket of step 5 has its values."""

    step, marker = 5, None

    def __init__(self, *names: str) -> None:
        self.names, self.held = names, Hold()

    def hold(self, owner: str) -> Hold:
        return self.held


class BrokenSender:
    failed = False

    def hurry(self, *_: Any, **__: Any) -> bool:
        raise ZeroDivisionError("a mistake of ours")

    def stop(self) -> None:
        self.failed = True

    def join(self, timeout: float) -> None:
        pass


@pytest.fixture
def session() -> StuckSession:
    return StuckSession()


def make(session: StuckSession, departure: Departure | None = None) -> tuple[Any, threading.Event]:
    """A donor's part, which waits for the step's end; and when nothing more is said about it."""
    over = threading.Event()
    places = Places(("127.0.0.1",), ("cpu",), ("m",))
    asked = {"places": [["127.0.0.1", "cpu", "m"]], "approach": "deepclone"}
    given: Any = (None, CloneSettings(), session, places, asked, None, departure or Departure())
    return Serving(*given, on_over=over.set), over


@pytest.fixture
def serving(session: StuckSession) -> Iterator[Any]:
    made, over = make(session)
    yield made
    session.answers.set()
    made.stop()
    assert over.wait(LONG)
    made.join(LONG)


def returns(act: Callable[[], object]) -> None:
    """See that a call comes back, whatever it waits for."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(LONG / 2)
    assert not thread.is_alive()


def test_a_board_that_does_not_answer_holds_up_nobody(session: StuckSession, serving: Any) -> None:
    serving._link = Link()
    returns(lambda: serving.fail("it failed"))
    assert serving.over.is_set()
    assert serving.report.failure == "it failed"
    assert not session.told
    session.answers.set()
    assert serving._link.closed.wait(LONG)
    assert session.told == ["it failed"]


def test_a_named_step_is_not_asked_for_before_it_can_be_known(session: StuckSession) -> None:
    """Each time costs the training's thread an answer, and all of them its patience."""
    asked: list[float] = []

    class Rank1:
        group = type("Group", (), {"rank": 1})

    def heard(key: str, timeout: float) -> int | None:
        asked.append(timeout)
        return 1000 if len(asked) == 2 else None

    serving, over = make(session, Departure(at_step=1000))
    session.heard = heard  # type: ignore[attr-defined]
    session.answers.set()
    serving._run, serving._contents, serving._armed = Rank1, object(), True
    for step in range(1, 1000):
        serving.step_ended(step)
    assert len(asked) == 2
    assert serving._fire == 1000
    serving.stop()
    assert over.wait(LONG)
    serving.join(LONG)


def test_a_mistake_while_a_bucket_is_announced_ends_the_fork_only(serving: Any) -> None:
    serving._fire, serving._sender = 5, BrokenSender()
    serving._buckets_of = {"a": 0}  # and no such bucket is waited for
    event = Updated("a")
    serving.updated(event)
    assert event.held.released
    assert "KeyError" in serving.report.failure
    later = Updated("a")
    serving.updated(later)
    assert later.held.assist is None


@pytest.mark.parametrize("names", [("a", "b"), ("c",), ("a", "c")])
def test_buckets_that_were_laid_out_anew_are_no_failure(
    serving: Any, names: tuple[str, ...]
) -> None:
    serving._fire, serving._sender = 5, BrokenSender()
    serving._buckets_of, serving._waiting = {"a": 0, "b": 1}, {0: {"a"}, 1: {"b"}}
    event = Updated(*names)
    serving.updated(event)
    assert event.held.released
    assert not serving.report.failure


def test_a_mistake_while_an_update_waits_lets_it_go_on(serving: Any) -> None:
    serving._fire, serving._sender = 5, BrokenSender()
    serving._buckets_of, serving._waiting, serving._holds = {"a": 0}, {0: {"a", "b"}}, {0: []}
    serving._buckets_of["b"] = 0
    event = Updated("a")
    serving.updated(event)
    assert not event.held.released
    assert event.held.assist is not None
    event.held.assist()
    assert event.held.released
    assert serving.report.failure == "ZeroDivisionError: a mistake of ours"


def test_without_another_thread_the_fork_s_own_tells_the_clones(
    session: StuckSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, over = make(session)
    serving._link = Link()
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "sapwood-clone-close":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    session.answers.set()
    serving.fail("it failed")
    assert over.wait(LONG)
    serving.join(LONG)
    assert session.told == ["it failed"]
    assert serving._link.closed.is_set()


def test_whatever_ends_the_sender_is_said() -> None:
    """Else updates would wait for it, and the fork for ever."""
    heard: list[str] = []
    told = threading.Event()

    def on_failure(why: str) -> None:
        heard.append(why)
        told.set()

    class Plan:
        donors, clones, checks_tag = 1, 1, 0

        def sent_by(self, donor: int) -> list[Any]:
            return []

    given: Any = (None, Plan(), 0, None)  # no link
    sender = Sender(*given, timeout=1.0, algorithm="no such", device="cpu", on_failure=on_failure)
    sender.complete()
    assert told.wait(LONG)
    sender.join(LONG)
    assert heard[0].startswith("sending failed: ")
    assert not sender.finished.is_set()


# -- a whole donor ---------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[sapwood.Run]:
    model = torch.nn.Linear(2, 2)
    made = sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    yield made
    made.close()


def ask_for_a_fork(address: Address) -> str:
    request = {"versions": versions(), "places": [["127.0.0.1", "cpu", "m"]]}
    return str(ask(address, request)["session"])


def test_a_fork_that_cannot_be_served_is_told_and_not_the_last(
    run: sapwood.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.allow_clones()
    address = Address.read(run.folder)
    board = RemoteBoard("127.0.0.1", address.port, address.token(), timeout=LONG)

    def serving(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(donor_module, "Serving", serving)
        session = Session(board, ask_for_a_fork(address), timeout=LONG)
        with pytest.raises(CloneError, match="rank 0 cannot serve it: can't start new thread"):
            session.hear("manifest", "waiting", LONG)
    assert [f.failure for f in run.forks] == ["rank 0 cannot serve it: can't start new thread"]
    again = Session(board, ask_for_a_fork(address), timeout=LONG)
    until(lambda: len(run.forks) == 2, "a second fork")
    run.model(torch.ones(1, 2)).sum().backward()
    run.step()  # the donor looks at it
    assert again.hear("manifest", "waiting", LONG)
    board.close()


class Interrupted:
    """A board whose machine does not answer at first."""

    def __init__(self, board: Any, failures: int) -> None:
        self._board, self.left = board, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    def wait_any(self, *asked: Any) -> str | None:
        if self.left:
            self.left -= 1
            raise TimeoutError("nothing was said for 90 s")
        found: str | None = self._board.wait_any(*asked)
        return found


def test_a_rank_0_that_was_stopped_for_a_while_does_not_end_all_later_forks(
    run: sapwood.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_module, "_AGAIN", 0.01)
    open_board = donor_module.Donor._open_board
    monkeypatch.setattr(
        donor_module.Donor,
        "_open_board",
        lambda donor, host: Interrupted(open_board(donor, host), 3),
    )
    run.allow_clones()
    ask_for_a_fork(Address.read(run.folder))
    until(lambda: run.forks, "the fork to be served")


def test_a_folder_that_cannot_be_written_is_said_and_leaves_no_listener(
    run: sapwood.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_text(path: Path, text: str, **_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = {thread.name for thread in threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr("sapwood.clone.listener.replace_text", replace_text)
        with pytest.raises(ConfigError, match="give Run another folder="):
            run.allow_clones()
    assert {thread.name for thread in threading.enumerate()} <= before
    run.allow_clones()  # it can be tried again
