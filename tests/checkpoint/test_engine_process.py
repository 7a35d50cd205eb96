"""A real engine process and ranks without a training: its life, its death, and bad company."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.link import Refused, _shake_hands
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.server import Server
from sapwood.checkpoint.engine.session import Session
from sapwood.checkpoint.engine.wire import Wire, WireError
from sapwood.errors import CheckpointError
from sapwood.tiers.base import Stored, read_range
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.memory import MemoryTier
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import TierSpec
from tests.checkpoint import engines
from tests.checkpoint.engines import Rank, armed, pid_of, rank, see_end, until
from tests.tiers import contract, shards

BOTH = {"memory", "external"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


def check_external(place: Path, step: int, one: Rank) -> None:
    tier = ExternalTier(place)
    memory = contract.read_all(tier, Stored(CheckpointId(step, shards.ATTEMPT), one.rank))
    assert np.array_equal(memory, shards.fill(one.plan, one.rank, step))


def test_shards_become_durable_and_arenas_free(place: Path) -> None:
    with rank(place) as one:
        first, second = one.lend(), one.lend()
        one.submit(1, first)
        one.submit(2, second)
        assert one.engine.drain(30)
        assert one.durable() == {(step, tier) for step in (1, 2) for tier in BOTH}
        until(lambda: one.freed() == [first], "the older arena is given back, the newer rests")
        one.submit(3, first)
        assert one.engine.drain(30)
        for step in (1, 2, 3):
            check_external(place, step, one)
        assert one.failed() == set()
    # An engine that ended in peace leaves nothing but checkpoints.
    assert all(CheckpointId.parse(entry.name) for entry in place.iterdir())


def test_it_is_small_polite_and_detached(place: Path) -> None:
    with rank(place) as one:
        pid = one.engine.pid
        assert pid is not None
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(os.getpid()))
        assert os.getpriority(os.PRIO_PROCESS, pid) == max(10, os.getpriority(os.PRIO_PROCESS, 0))
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        found = engines.descriptors(pid)
        mine = {str(Path(f"/proc/self/fd/{n}").readlink()) for n in (0, 1, 2)} - {"/dev/null"}
        assert not mine & found, "the launcher's own pipes are not kept open"
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        )
        assert engines.TOKEN.encode() not in command


def test_importing_the_engine_imports_no_torch() -> None:
    code = "import sys, sapwood.checkpoint.engine.daemon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_ranks_of_a_node_share_it_and_the_last_goodbye_ends_it(place: Path) -> None:
    with closing(Rank(place, world=2)) as one, closing(Rank(place, rank=1, world=2)) as two:
        pid = one.engine.pid
        assert pid == two.engine.pid
        one.submit(1, one.lend())
        one.close()
        two.submit(1, two.lend())
        assert two.engine.drain(30)
        assert two.durable() == {(1, tier) for tier in BOTH}
    see_end(pid, timeout=5)


def test_other_nodes_and_other_places_have_their_own(place: Path) -> None:
    with rank(place) as one, rank(place, node="n1") as two, rank(place / "x") as three:
        assert len({one.engine.pid, two.engine.pid, three.engine.pid}) == 3


def test_whoever_dies_after_submitting_loses_nothing(place: Path) -> None:
    with armed("engine.put:sleep:0.3@*"):
        one = Rank(place, linger=0.2)
    pid = one.engine.pid
    one.submit(1, one.lend())
    one.vanish()
    see_end(pid)
    check_external(place, 1, one)
    assert not list(place.glob(".engine-*"))


def test_a_rank_that_dies_before_submitting_leaves_no_memory(place: Path) -> None:
    with rank(place, world=2) as one:
        two = Rank(place, rank=1, world=2, linger=0.0)
        two.lend()
        pid = one.engine.pid
        assert pid is not None

        until(lambda: engines.arenas(pid) == 1, "the arena is there")
        kept = one.lend()
        one.submit(1, kept)
        assert one.engine.drain(30)
        two.vanish()
        until(lambda: engines.arenas(pid) == 1, "only the arena that is in use is kept")


def test_it_waits_for_ranks_that_come_back_and_shows_what_it_has_in_memory(place: Path) -> None:
    one = Rank(place)
    pid = one.engine.pid
    id = one.submit(4, one.lend())
    one.vanish()
    # Another group: it knows the place, but has a token of its own.
    with rank(place, token="another") as two:
        assert two.engine.pid == pid
        assert two.engine.settle(30)
        tier = two.engine.memory()
        assert tier.shards() == [Stored(id, 0)]
        with closing(tier.open(Stored(id, 0))) as shard:
            assert shard.record.extras == {"step": 4, "rank": 0}
            memory = np.zeros(shard.record.nbytes, np.uint8)
            for part in shard.record.ranges:
                read_range(shard, part, memory[part.at : part.at + part.nbytes])
            assert np.array_equal(memory, shards.fill(one.plan, 0, 4))
        with pytest.raises(CheckpointError, match="no longer in memory"):
            tier.open(Stored(CheckpointId(9, "abcdef"), 0))
        # The same settings, so its first shard takes the old one's place.
        two.submit(5, two.lend())
        assert two.engine.drain(30)
        assert [stored.id.step for stored in tier.shards()] == [5]


def test_memory_of_other_settings_goes_when_the_new_ones_are_used(place: Path) -> None:
    old = [Rank(place, rank=r, world=2) for r in (0, 1)]
    for one in old:
        one.submit(4, one.lend())
        assert one.engine.drain(30)
        one.vanish()
    with rank(place, world=1, token="another") as two:
        tier = two.engine.memory()
        assert [(s.id.step, s.rank) for s in tier.shards()] == [(4, 0), (4, 1)]
        two.submit(5, two.lend())
        assert two.engine.drain(30)
        assert [(s.id.step, s.rank) for s in tier.shards()] == [(5, 0)]


def test_it_ends_by_itself_when_nobody_comes_back(place: Path) -> None:
    one = Rank(place, linger=0.1)
    pid = one.engine.pid
    one.vanish()
    see_end(pid)
    assert pid_of(engines.address(place)) is None


# -- bad company ------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_the_engine_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.checkpoint.engine.reach._REFUSALS", 0.1)
    with rank(place) as one:
        (file,) = place.glob(".engine-*")
        assert file.stat().st_mode & 0o777 == 0o600
        token = file.read_text()
        file.write_text("wrong")
        with pytest.raises(Refused, match="the token is wrong"):
            Rank(place, token="also wrong")
        file.write_text(token)
        file.chmod(0o644)  # whoever could read it may have it: it is worth nothing
        with pytest.raises(Refused, match="the token is wrong"):
            Rank(place, token="also wrong")
        one.submit(1, one.lend())
        assert one.engine.drain(30)
        assert one.durable() == {(1, tier) for tier in BOTH}


def test_who_seems_to_be_another_user_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides look, whoever runs the tests; with real users only root can try it, below."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        wire = Wire(ours, send_timeout=5)
        address, me = engines.address(place), os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        with pytest.raises(WireError, match=f"is of user {me}, this engine of {me + 1}"):
            Server(theirs, address, "token", linger=0)._admit(wire)
        with pytest.raises(Refused, match=f"of user {me} has taken the name"):
            _shake_hands(wire, {})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(place: Path) -> None:
    code = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1].replace('@', chr(0)))
print(sock.recv(1000))
"""
    with rank(place) as one:
        name = "@" + engines.address(place).name
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "b''\n"  # it is told nothing
        one.submit(1, one.lend())
        assert one.engine.drain(30)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_engine_of_another_user_is_refused(place: Path) -> None:
    code = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1].replace('@', chr(0)))
sock.listen()
print('here', flush=True)
sys.stdin.read()
"""
    name = "@" + engines.address(place).name
    with subprocess.Popen(
        [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        with pytest.raises(Refused, match="user 65534 has taken the name"):
            Rank(place)


def raw(place: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(engines.address(place).socket)
    return sock


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!4sHHI", b"SWCE", 1, 0, 2**32 - 1),
        struct.pack("!4sHHI", b"SWCE", 1, 0, 500) + b"{",
        struct.pack("!4sHHI", b"SWCE", 1, 0, 16) + b'{"op":"hello"}  ',
        b"SW",
        b"",
    ],
)
def test_garbage_is_refused_and_the_engine_goes_on(place: Path, sent: bytes) -> None:
    with rank(place) as one:
        with raw(place) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):  # what it did not read
                while part := sock.recv(4096):
                    answer += part
        assert b"refused" in answer or sent in (b"", b"SW") or not answer
        one.submit(1, one.lend())
        assert one.engine.drain(30)
        assert one.durable() == {(1, tier) for tier in BOTH}


@pytest.mark.parametrize(
    "message",
    [
        {"op": "nonsense"},
        {"op": "submit", "plan": 7},
        {"op": "lend", "arena": 0},
        {"op": "plan", "plan": 0, "world": 1, "rank": 3, "catalog": [], "pieces": []},
        {"op": "plan", "plan": 0, "world": 1, "rank": 0, "catalog": [[1]], "pieces": []},
        {"op": "drop", "id": [1, "../../etc"], "tiers": ["external"]},
        {"op": "recall"},
    ],
    ids=lambda m: str(m["op"]),
)
def test_a_rank_that_talks_nonsense_is_sent_away_and_may_come_back(
    place: Path, message: dict[str, object]
) -> None:
    with rank(place) as one:
        pid = one.engine.pid
        arena = one.lend()
        link = one.engine._link
        assert link is not None
        link.wire.send(message)
        assert link.finished.wait(30)
        until(lambda: one.engine._link not in (None, link), "it is found again")
        one.submit(1, arena)
        assert one.engine.drain(30)
        assert one.durable() == {(1, tier) for tier in BOTH}
        assert one.engine.pid == pid


def test_orders_of_an_older_connection_are_refused() -> None:
    tier = MemoryTier()
    pipeline = Pipeline([(TierSpec(kind="memory"), tier)], lambda progress: None)
    session = Session("s", "g", pipeline)
    pairs = [socket.socketpair(socket.AF_UNIX) for _ in range(2)]
    older, newer = (Wire(left, send_timeout=1) for left, _ in pairs)
    assert session.attach(older, 0)
    with session.order_from(older):
        session.lend(0, Arena(64))
    assert session.attach(newer, 1)
    with pytest.raises(WireError, match="connected again"), session.order_from(older):
        pytest.fail("an arena could be read while it is filled")
    assert not session.attach(older, 0), "a hello that comes late takes nothing over"
    assert not session.detach(older)
    assert session.attached
    assert session.detach(newer)
    assert session.idle
    pipeline.close(5)
    for wire in (older, newer):
        wire.close()
    for _, right in pairs:
        right.close()


@pytest.mark.parametrize("size", [0, 10])
def test_memory_that_is_no_arena_is_refused(place: Path, size: int) -> None:
    with rank(place) as one:
        link = one.engine._link
        assert link is not None
        fd = os.memfd_create("odd")
        os.ftruncate(fd, size)
        link.wire.send({"op": "lend", "arena": 99}, [fd])
        os.close(fd)
        if size:  # mapped, but no shard fits
            one.arenas[99] = Arena(one.plan.shards[0].nbytes)
            one.submit(1, 99)
        assert link.finished.wait(30)
        assert one.engine.drain(30)
        until(lambda: one.engine._link not in (None, link), "it is found again")
        one.submit(2, one.lend())
        assert one.engine.drain(30)
        assert {(2, tier) for tier in BOTH} <= one.durable()
        assert not {(1, tier) for tier in BOTH} & one.durable()


# -- accidents --------------------------------------------------------------------------------


def test_a_killed_engine_is_reported_once_and_started_again(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with armed("engine.put:kill@1[tier=external,step=2]"):
        one = Rank(place)
    with closing(one):
        arenas = [one.lend(), one.lend()]
        one.submit(1, arenas[0])
        assert one.engine.drain(30)
        one.submit(2, arenas[1])
        assert one.engine.drain(30)
        assert one.failed() == {(2, "external")}
        until(lambda: sorted(one.freed()) == arenas, "both arenas are free again")
        lost = [r for r in caplog.records if "lost the checkpoint engine" in r.message]
        assert len(lost) == 1
        for step in (3, 4):
            one.submit(step, arenas[step % 2])
            assert one.engine.drain(30)
            check_external(place, step, one)
        pid = one.engine.pid
    see_end(pid)


def test_a_stopped_engine_holds_nobody_up(place: Path) -> None:
    with rank(place) as one:
        pid = one.engine.pid
        assert pid is not None
        arena = one.lend()
        os.kill(pid, signal.SIGSTOP)
        try:
            one.submit(1, arena)
            assert not one.engine.drain(0.1)
            with pytest.raises(CheckpointError):
                one.engine._link.ask("list", 0.1)  # type: ignore[union-attr]
            assert one.freed() == []
        finally:
            os.kill(pid, signal.SIGCONT)
        assert one.engine.drain(30)
        assert one.durable() == {(1, tier) for tier in BOTH}


def test_a_stopped_engine_that_reads_nothing_is_found_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.checkpoint.engine.link.SEND_TIMEOUT", 0.2)
    monkeypatch.setattr("sapwood.checkpoint.engine.link.HELLO_TIMEOUT", 1.0)
    with rank(place) as one:
        pid = one.engine.pid
        assert pid is not None
        first, second = one.lend(), one.lend()
        one.submit(1, first)
        assert one.engine.drain(30)
        broken = one.engine._link
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(100):  # far more than fits into a socket's buffer
                one.engine.drop(CheckpointId(99, "abcdef"), ("x" * 10_000,))
            one.submit(2, second)
            assert one.failed() == {(2, "external"), (2, "memory")}
            assert one.freed() == [second], "what the engine may still read stays as it is"
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: one.engine._link not in (None, broken), "it is found again")
        assert one.engine.pid == pid
        one.submit(3, second)
        assert one.engine.drain(30)
        until(lambda: one.freed() == [second, first], "the memory tier has a newer shard")
        check_external(place, 3, one)


def test_an_engine_that_does_not_answer_is_said_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.checkpoint.engine.link.HELLO_TIMEOUT", 0.5)
    with rank(place, linger=0.2) as one:
        pid = one.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(CheckpointError, match=f"process {pid}, does not answer"):
                Rank(place, linger=0.2)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("point", ["engine.describe", "engine.put"])
def test_what_nobody_foresaw_is_told_and_logged(place: Path, point: str) -> None:
    with armed(f"{point}:raise@1"):
        one = Rank(place)
    with closing(one):
        pid = one.engine.pid
        arenas = [one.lend(), one.lend()]
        one.submit(1, arenas[0])
        assert one.engine.drain(30)
        assert one.failed() >= {(1, "memory")}
        assert "InjectedError" in one.of(engines.Failed)[0].message
        one.submit(2, arenas[1])
        assert one.engine.drain(30)
        assert {(2, tier) for tier in BOTH} <= one.durable()
    see_end(pid)
    text = one.log.read_text()
    assert "Traceback" in text
    assert "InjectedError" in text


def test_an_engine_that_cannot_start_says_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match="did not start"):
        Rank(place)


def test_a_training_goes_on_when_no_engine_can_be_started(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank(place)
    pid = one.engine.pid
    assert pid is not None
    arena = one.lend()
    with closing(one):
        os.kill(pid, signal.SIGKILL)
        until(lambda: one.engine.pid is None, "its death is noticed")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            one.submit(1, arena)
        assert one.engine.drain(30)
        assert one.failed() == {(1, tier) for tier in BOTH}
        assert one.freed() == [arena]
        one.submit(2, arena)
        assert one.engine.drain(30)
        assert one.durable() == {(2, tier) for tier in BOTH}
        pid = one.engine.pid
    see_end(pid)


def test_a_request_to_end_finishes_the_work(place: Path) -> None:
    with armed("engine.put:sleep:0.3@*"):
        one = Rank(place)
    pid = one.engine.pid
    assert pid is not None
    with closing(one):
        one.submit(1, one.lend())
        until(lambda: one.of(engines.Durable), "the first tier has it")
        os.kill(pid, signal.SIGTERM)
        see_end(pid)
        check_external(place, 1, one)


def test_a_place_without_a_token_file_still_has_an_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with rank(tmp_path / "file" / "x", tiers=("memory", "external")) as one:
        assert one.engine.pid is not None


def test_a_wire_says_who_is_there() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    wire = Wire(left, send_timeout=1)
    assert wire.peer == (os.getpid(), os.getuid())
    wire.close()
    right.close()
