"""Machines are apart, joined by links of a given rate, and gone with whoever made them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sapwood.errors import ConfigError, RankError, UsageError
from sapwood.testing import ranks
from sapwood.testing._netspace import Namespace
from sapwood.testing.machines import Machines, Unavailable
from tests.marks import needs_machines

ADDRESSES = ["10.83.0.1", "10.83.0.2", "10.83.0.3"]
FOREVER = """
import sys, time
from sapwood.testing.machines import Machines
with Machines(2) as made:
    print(made.namespace(0), made.namespace(1), flush=True)
    time.sleep(300)
"""


def network() -> str:
    return str(Path("/proc/self/ns/net").readlink())


def where() -> dict[str, str]:
    """Who this rank is, where it is, and what all of them sum to."""
    ours = torch.full((1000,), float(ranks.rank() + 1))
    dist.all_reduce(ours)
    facts = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    return {**facts, "network": network(), "sum": str(ours[0].item())}


def meet_by_abstract_socket() -> bool:
    """Rank 0 listens; whether this rank can reach it."""
    if ranks.rank() == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0sapwood-test-machines")
            listener.listen(8)
            dist.barrier()
            dist.barrier()
        return True
    dist.barrier()
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect("\0sapwood-test-machines")
        return True
    except ConnectionRefusedError:
        return False
    finally:
        dist.barrier()


def stand_still() -> None:
    ranks.mark("here")
    signal.pause()


@needs_machines
@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_ranks_on_unequal_machines_average(store: ranks.Store) -> None:
    found = ranks.spawn(where, 4, init=True, machines=[2, 1, 1], store=store)
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1", "1"]
    assert {one["sum"] for one in found} == {"10.0"}
    networks = [one["network"] for one in found]
    assert networks[0] == networks[1]
    assert len({network(), *networks}) == 4


@needs_machines
def test_abstract_sockets_reach_only_their_own_machine() -> None:
    assert ranks.spawn(meet_by_abstract_socket, 3, init=True, machines=[2, 1]) == [
        True,
        True,
        False,
    ]


@needs_machines
def test_a_machine_reaches_the_others_and_nobody_else() -> None:
    with Machines(3) as made:
        assert [made.address(one) for one in range(3)] == ADDRESSES
        listener = made.call(2, socket.create_server, (made.address(2), 0))
        with listener:
            with made.call(0, socket.create_connection, listener.getsockname(), 10):
                pass
            with pytest.raises(OSError), socket.create_connection(listener.getsockname(), 0.2):
                pass
        said = subprocess.run(
            made.command(1, ["ip", "-brief", "address"]), capture_output=True, text=True, check=True
        )
        assert f"{made.address(1)}/24" in said.stdout


@needs_machines
def test_links_keep_their_rate() -> None:
    with Machines(2, gbit=0.4) as made:
        assert made.measure() <= 0.4 * 1.15
    with Machines(2) as made:
        assert made.measure() > 0.4 * 1.15
    with Machines(3, gbit=0.4, unlimited=[0, 1]) as made:
        assert made.measure(0, 1) > 0.4 * 1.15
        assert made.measure(0, 2) <= 0.4 * 1.15


@needs_machines
def test_a_killed_rank_is_told_and_its_machines_are_removed() -> None:
    with ranks.start(stand_still, 2, machines=[1, 1]) as group:
        group.wait_mark("here", rank=0)
        group.wait_mark("here", rank=1)
        group.kill(1)
        (outcome,) = group.wait(20, ranks=[1])
        assert outcome.signal == signal.SIGKILL


@needs_machines
def test_a_rank_that_raises_on_a_machine_is_told() -> None:
    with pytest.raises(RankError, match="a word of its own"):
        ranks.spawn(raise_key_error, 2, machines=[1, 1])


def raise_key_error() -> None:
    raise KeyError("a word of its own")


@needs_machines
def test_machines_end_with_the_process_that_made_them() -> None:
    maker = subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE, text=True)
    with maker:
        assert maker.stdout is not None
        paths = [Path(text) for text in maker.stdout.readline().split()]
        assert len(paths) == 2
        assert all(path.exists() for path in paths)
        holders = [int(path.parts[2]) for path in paths]
        maker.kill()
    for holder in holders:
        assert ended(holder)


def ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


@needs_machines
def test_a_call_hands_on_what_it_raises() -> None:
    with Machines(1) as made, pytest.raises(OSError, match="refused"):
        made.call(0, socket.create_connection, (made.address(0), 9), 5)


def test_wrong_options_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"machines=\[2, 1\] have 3 ranks, not 4"):
        ranks.spawn(where, 4, machines=[2, 1])
    with pytest.raises(ConfigError, match="expected the number of ranks of each"):
        ranks.spawn(where, 2, machines=[2, 0])
    with pytest.raises(ConfigError, match="give machines="):
        ranks.spawn(where, 2, gbit=3)
    with pytest.raises(ConfigError, match="count=0"):
        Machines(0)
    with pytest.raises(ConfigError, match="gbit=-1"):
        Machines(2, gbit=-1)
    with pytest.raises(UsageError, match="inside their with block"):
        Machines(2).address(0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match=r"root|missing"), Machines(1):
        pass


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool, path: None)
    with pytest.raises(Unavailable, match="missing: unshare, nsenter, ip, tc"), Machines(1):
        pass


@needs_machines
def test_a_command_that_fails_says_what_it_said() -> None:
    space = Namespace()
    try:
        with pytest.raises(Unavailable, match="ip link set nothing up"):
            space.run("", ["ip", "link", "set", "nothing", "up"])
    finally:
        space.close()
