"""The board on which both sides of a fork tell each other what they need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from sapwood.channel.connection import ChannelError
from sapwood.clone.board import Board
from sapwood.clone.boardstore import BoardStore
from sapwood.clone.listener import ForkListener
from sapwood.clone.remote import BoardAccess, RemoteBoard
from sapwood.clone.session import BoardGone, Session, prefix_of
from sapwood.errors import CloneError
from sapwood.runtime.stores import PrefixStore

TOKEN = "a token"


@pytest.fixture
def here() -> Board:
    return Board()


@pytest.fixture
def listener(here: Board, tmp_path: Path) -> Iterator[ForkListener]:
    made = ForkListener(tmp_path, host="127.0.0.1", token=TOKEN, board=here, answer=dict)
    yield made
    made.close()


@pytest.fixture(params=["here", "there"])
def board(
    request: pytest.FixtureRequest, here: Board, listener: ForkListener
) -> Iterator[BoardAccess]:
    if request.param == "here":
        yield here
        return
    remote = RemoteBoard("127.0.0.1", listener.address.port, TOKEN, timeout=20.0)
    yield remote
    remote.close()


def test_keys_and_bytes(board: BoardAccess) -> None:
    assert board.get("a") is None
    board.set("a", b"\0\xff" * 1000)
    assert board.get("a") == b"\0\xff" * 1000
    assert board.add("n", 2) == 2
    assert board.add("n", 0) == 2
    assert board.add("none", 0) == 0
    assert board.get("none") is None
    assert board.compare_set("c", b"", b"first") == b"first"
    assert board.compare_set("c", b"", b"second") == b"first"
    assert board.compare_set("c", b"first", b"third") == b"third"
    assert board.delete("c")
    assert not board.delete("c")
    large = bytes(20 * 2**20)  # more than torch's own store takes
    board.set("large", large)
    assert board.get("large") == large


def test_waiting_ends_when_something_is_written(board: BoardAccess, here: Board) -> None:
    assert board.wait_any(["a", "b"], 0.01) is None
    threading.Timer(0.05, lambda: here.set("b", b"1")).start()
    assert board.wait_any(["a", "b"], 60.0) == "b"
    here.set("count", b"2")
    assert board.wait_any(["count"], 0.01, at_least=3) is None
    threading.Timer(0.05, lambda: here.add("count", 1)).start()
    assert board.wait_any(["count", "failed"], 60.0, at_least=3) == "count"


def test_whoever_waits_is_woken_by_the_end(
    board: BoardAccess, here: Board, listener: ForkListener
) -> None:
    threading.Timer(0.05, listener.close).start()
    with pytest.raises(OSError):
        board.wait_any(["never"], 60.0)


def test_a_fork_that_is_over_leaves_little(here: Board) -> None:
    for number in range(500):
        prefix = prefix_of(f"session{number}")
        here.set(prefix + "manifest", bytes(100_000))
        here.set(prefix + "gloo/at/0", b"address")
        here.add(prefix + "posted", 1)
        here.set(prefix + "failed", b'"why"')
        here.end(prefix)
        here.set(prefix + "gloo/at/1", bytes(100_000))  # somebody who was late
        assert here.get(prefix + "failed") == b'"why"'
        assert here.get(prefix + "manifest") is None
    assert here.nbytes < 20_000


def test_a_wrong_token(listener: ForkListener) -> None:
    board = RemoteBoard("127.0.0.1", listener.address.port, "guessed", timeout=5.0)
    with pytest.raises(ChannelError):
        board.get("a")
    board.close()


def test_nonsense_is_an_answer_and_not_the_end(listener: ForkListener, here: Board) -> None:
    board = RemoteBoard("127.0.0.1", listener.address.port, TOKEN, timeout=5.0)
    for request in (
        {"op": "add", "key": "a", "amount": "x"},
        {"op": "get"},
        {"op": "wait", "keys": None, "seconds": 1},
        {"op": "compare_set", "key": "a"},
    ):
        with pytest.raises(ChannelError):
            board.ask(request)
    here.set("a", b"1")
    assert board.get("a") == b"1"
    with pytest.raises(ChannelError):  # too large: not taken, and the connection is ended
        board.ask({"op": "set", "key": "a", "nbytes": 2**40})
    assert board.get("a") == b"1"
    board.close()


def test_a_manifest_is_as_long_as_it_needs_to_be(board: BoardAccess, here: Board) -> None:
    """7 MiB are some ten thousand tensors; the first answer must not be the last."""
    text = "\u00e9 tensor" * 2**20
    session = Session(board, "large", timeout=20.0)
    session.say("manifest", text)
    for _ in range(2):
        assert session.hear("manifest", "waiting", 20.0) == text
    assert here.nbytes > 8 * 2**20


def test_torch_takes_it_for_a_store(board: BoardAccess) -> None:
    inner = BoardStore(board, "fork/x/", timeout=0.2)
    store = PrefixStore("inside", inner)
    store.set("a", "text")
    assert store.get("a") == b"text"
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.add("n", 3) == 3
    with pytest.raises(RuntimeError, match="wait timed out"):
        store.get("b")
    store.wait(["a"], timedelta(seconds=1))
    assert board.get("fork/x/inside/a") == b"text"


def test_a_gloo_group_meets_on_it(here: Board, listener: ForkListener) -> None:
    boards = [here, RemoteBoard("127.0.0.1", listener.address.port, TOKEN, timeout=20.0)]
    sums: dict[int, torch.Tensor] = {}

    def member(rank: int) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [ProcessGroupGloo.create_device(interface="lo")]
        options._threads = 1
        inner = BoardStore(boards[rank], "fork/x/", timeout=20.0)
        group = ProcessGroupGloo(PrefixStore("gloo", inner), rank, 2, options)
        data = torch.full((4,), float(rank + 1))
        group.allreduce([data], dist.AllreduceOptions()).wait()
        sums[rank] = data

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    boards[1].close()
    assert sums[0].tolist() == sums[1].tolist() == [3.0] * 4


def test_a_session(board: BoardAccess, here: Board, listener: ForkListener) -> None:
    session, other = (Session(b, "s", timeout=5.0) for b in (board, here))
    session.say("fire", 7)
    assert other.hear("fire", "a step", 1.0) == 7
    assert session.count("posted") == 1
    with pytest.raises(CloneError, match=r"the clones: nothing for 0\.01 s"):
        session.hear_count("posted", 2, "the clones", 0.01)
    other.count("posted")
    session.hear_count("posted", 2, "the clones", 1.0)
    session.check()
    other.fail("because")
    session.fail("another reason")
    with pytest.raises(CloneError, match=r"^because$"):
        session.hear("ready", "the clones", 60.0)
    listener.close()
    with pytest.raises(BoardGone):
        session.hear("never", "nothing", 60.0)
