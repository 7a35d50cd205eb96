"""Which ranks share a machine, and the links between those that do."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch

from sapwood.errors import ConfigError
from sapwood.runtime import machines as found_machines
from sapwood.runtime.group import Group
from sapwood.runtime.machines import Machines, find_machines
from sapwood.sync.averaging import choose_averager
from sapwood.testing import ranks
from tests.marks import needs_machines

CPU = torch.device("cpu")


def test_machines_with_unequal_numbers_of_ranks() -> None:
    machines = Machines.of(["b", "a", "b", "b", "a", "c", "c"])
    assert machines.ranks == ((0, 2, 3), (1, 4), (5, 6))
    assert machines.shared
    assert machines.lanes == 2
    assert [machines.lane(n) for n in range(2)] == [(0, 1, 5), (2, 4, 6)]
    assert machines.of_rank(3) == (0, 2, 3)
    assert str(machines) == "3 machines: 0, 2-3 | 1, 4 | 5-6"


def test_machines_with_one_rank_each() -> None:
    assert Machines.apart(3) == Machines.of(["x", "y", "z"])
    assert not Machines.apart(3).shared
    assert Machines.apart(3).lanes == 1
    assert Machines.apart(3).lane(0) == (0, 1, 2)
    assert str(Machines.apart(1)) == "1 machine: 0"


def discover(change: str = "", timeout: float = 30.0) -> dict[str, Any]:
    """Find the machines while something is odd on one rank."""
    group = Group.join(CPU, timeout=timeout)
    strangers: list[socket.socket] = []
    make = found_machines._listener

    def with_strangers(token: str, rank: int) -> socket.socket:
        listener = make(token, rank)
        for words in (None, b"", b"x", b"\0" * 36, found_machines._HELLO.pack(b"guess", 1)):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(found_machines._name(token, rank))
            if words is not None:
                stranger.send(words)
            strangers.append(stranger)
        return listener

    if change == "strangers" and group.rank == 0:
        found_machines._listener = with_strangers
    if change == "other user" and group.rank == 0:
        found_machines.peer_process = lambda link: (1, os.geteuid() + 1)
    if change == "other user below" and group.rank == 1:
        found_machines.peer_process = lambda link: (1, os.geteuid() + 1)
    start = time.monotonic()
    machines, links, problem = find_machines(group)
    facts = {"seconds": time.monotonic() - start, "machines": str(machines), "problem": problem}
    facts["linked"] = [rank for rank, _ in links]
    for _, link in links:
        assert not link.getblocking()
        link.send(b"from %d" % group.rank)
    group.gather_text("until all have sent", "")
    facts["heard"] = [link.recv(100).decode() for _, link in links]
    links.close()
    for one in strangers:
        one.close()
    group.close()
    return facts


def test_ranks_of_one_machine_find_each_other() -> None:
    found = ranks.spawn(discover, 3)
    assert [f["linked"] for f in found] == [[1, 2], [0, 2], [0, 1]]
    assert found[1]["heard"] == ["from 0", "from 2"]
    assert {f["machines"] for f in found} == {"1 machine: 0-2"}


@needs_machines
def test_a_network_namespace_is_a_machine() -> None:
    found = ranks.spawn(discover, 4, machines=[1, 2, 1])
    assert [f["linked"] for f in found] == [[], [2], [1], []]
    assert {f["machines"] for f in found} == {"3 machines: 0 | 1-2 | 3"}


def test_strangers_are_ignored() -> None:
    found = ranks.spawn(discover, 2, "strangers")
    assert [f["linked"] for f in found] == [[1], [0]]
    assert [f["heard"] for f in found] == [["from 1"], ["from 0"]]
    assert {f["problem"] for f in found} == {""}


@pytest.mark.parametrize("change", ["other user", "other user below"])
def test_another_users_process_is_refused_and_all_ranks_know(change: str) -> None:
    found = ranks.spawn(discover, 3, change, 4.0)
    assert [f["linked"] for f in found] == [[], [], []]
    assert {f["machines"] for f in found} == {"3 machines: 0 | 1 | 2"}
    assert len({f["problem"] for f in found}) == 1
    assert "rank" in found[0]["problem"]


def ask_for_node() -> str:
    if ranks.rank() == 1:
        found_machines.peer_process = lambda link: (1, os.geteuid() + 1)
    group = Group.join(CPU, timeout=4.0)
    try:
        choose_averager(group, "node")
    except ConfigError as error:
        return str(error)
    finally:
        group.close()
    return ""


def test_node_averaging_that_is_not_possible_is_refused_on_all_ranks() -> None:
    for told in ranks.spawn(ask_for_node, 2):
        assert "averaging='node' is not possible" in told
        assert "use averaging='direct'" in told


def test_node_averaging_is_refused_for_accelerators() -> None:
    class Far:
        world, rank, device = 2, 0, torch.device("meta")

    far: Any = Far()
    with pytest.raises(ConfigError, match="the model is on meta"):
        choose_averager(far, "node")
    chosen = choose_averager(far, "auto")
    assert chosen.averager.name == "direct"
    assert "meta has its own way" in chosen.reason


def test_another_users_connection_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could have as many as this process may have descriptors."""
    name = f"\0sapwood-test-{os.getpid()}"
    monkeypatch.setattr(found_machines, "peer_process", lambda link: (1, os.geteuid() + 1))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
    ):
        listener.bind(name)
        listener.listen()
        stranger.connect(name)
        stranger.settimeout(20.0)
        waiting = found_machines._accepted(listener, b"", {1}, time.monotonic() + 60.0)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(next(waiting)))
        thread.start()
        assert stranger.recv(1) == b""
        monkeypatch.undo()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
            ours.connect(name)
            ours.send(found_machines._HELLO.pack(b"", 1))
            thread.join(60.0)
        ((rank, link),) = found
        link.close()
        waiting.close()
        assert rank == 1
