"""The address a rank advertises: reachable from the other machines, and this machine's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.errors import ConfigError, RankError
from sapwood.runtime import host as hosts
from sapwood.runtime import interfaces, mpimeeting
from sapwood.runtime.group import Group
from sapwood.runtime.host import Hosts, bind_for, find_hosts, given_host, own_address
from sapwood.runtime.interfaces import is_own, own_addresses, route_to
from sapwood.testing import ranks
from sapwood.testing.machines import Machines
from tests.hosts import become_task
from tests.marks import needs_machines

ADDRESSES = ["10.83.0.1", "10.83.0.2", "10.83.0.3"]
MPIRUN = Path(sys.executable).with_name("mpirun")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hosts.HOST, raising=False)
    monkeypatch.delenv(hosts.BIND, raising=False)


def names(monkeypatch: pytest.MonkeyPatch, table: dict[str, list[str]]) -> None:
    """What the resolver says; addresses stay what they are."""
    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **more: Any) -> list[Any]:
        found = [real(one, *args, **more) for one in table.get(host, [host])]
        return [entry for entries in found for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


# -- what a user sets ------------------------------------------------------------------------


def test_loopback_may_be_asked_for() -> None:
    assert given_host({}) == ""
    assert given_host({hosts.HOST: "127.0.0.1"}) == "127.0.0.1"
    assert given_host({hosts.HOST: "localhost"}) in ("127.0.0.1", "::1")
    assert given_host({hosts.HOST: "[::1]"}) == "::1"


def test_an_address_of_another_machine_is_refused_and_ours_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "own_addresses", lambda: {"10.1.2.3": "ib0"})
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9.*no address of this.*10\.1\.2\.3 \(ib0"):
        given_host({hosts.HOST: "203.0.113.9"})
    names(monkeypatch, {"nowhere.invalid": []})
    with pytest.raises(ConfigError, match=r"host='nowhere\.invalid' is neither"):
        own_address("nowhere.invalid", "host")
    assert own_address("ib0", "host") == "10.1.2.3"


def test_a_forwarded_address_needs_to_be_told_where_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="set SAPWOOD_BIND"):
        own_address("203.0.113.9", "host")
    monkeypatch.setenv(hosts.BIND, "0.0.0.0")
    assert own_address("203.0.113.9", "host") == "203.0.113.9"
    assert bind_for("203.0.113.9") == "0.0.0.0"
    assert bind_for("127.0.0.1") == "127.0.0.1"


def test_a_forwarded_name_is_not_its_own_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hosts.BIND, "0.0.0.0")
    names(monkeypatch, {"node7": ["127.0.1.1", "203.0.113.9"], "node8": ["127.0.1.1"]})
    assert own_address("node7", "host") == "203.0.113.9"
    with pytest.raises(ConfigError, match=r"host='node8' is 127\.0\.1\.1 on this machine"):
        own_address("node8", "host")
    assert own_address("localhost", "host") == "127.0.0.1"


def test_debians_address_for_the_own_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, {"node7": ["127.0.1.1"]})
    with pytest.raises(ConfigError, match=r"'node7' is 127\.0\.1\.1 on this machine"):
        own_address("node7", "host")


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, {"node7": ["127.0.1.1", "203.0.113.9", "192.168.7.7"]})
    monkeypatch.setattr(hosts, "is_own", lambda one: not one.startswith("203"))
    assert own_address("node7", "host") == "192.168.7.7"
    ends = {"127.0.1.1": "127.0.0.1", "203.0.113.9": "", "192.168.7.7": "192.168.7.8"}
    monkeypatch.setattr(interfaces, "_local_end", ends.__getitem__)
    assert route_to("node7") == "192.168.7.8"


def test_addresses_of_this_machine() -> None:
    assert is_own("127.0.0.1")
    assert is_own("::1")
    assert not is_own("203.0.113.9")
    assert all(is_own(one) for one in own_addresses())
    assert not [one for one in own_addresses() if one.startswith(("127.", "fe80", "::1"))]
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert route_to("::1") == "::1"


# -- agreeing, without a network -------------------------------------------------------------


class Pretended:
    """A rank on a pretended machine: what it has, and how it reaches what."""

    def __init__(self, machine: str, *, meeting: str, given: str = "", **routes: str) -> None:
        self.machine, self.meeting, self.given = machine, meeting, given
        self.routes = {name.replace("_", "."): one for name, one in routes.items()}
        self.rank = 0
        self.hosts: Hosts | None = None
        self.gather_text: Callable[[str, str], list[str]] = lambda key, text: [text]


def agree(monkeypatch: pytest.MonkeyPatch, *group: Pretended) -> list[Hosts | str]:
    """What each rank finds, or the error it raises."""
    here = threading.local()
    barrier = threading.Barrier(len(group), timeout=20)
    said: dict[str, dict[int, str]] = {}
    found: dict[int, Hosts | str] = {}
    monkeypatch.setattr(hosts, "machine_key", lambda: here.rank.machine)
    monkeypatch.setattr(hosts, "route_to", lambda host: here.rank.routes.get(host, ""))
    monkeypatch.setattr(hosts, "given_host", lambda: here.rank.given)
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "debian")

    def work(number: int, member: Pretended) -> None:
        def gather(key: str, text: str) -> list[str]:
            said.setdefault(key, {})[number] = text
            barrier.wait()
            return [said[key][rank] for rank in range(len(group))]

        here.rank, member.rank, member.gather_text = member, number, gather
        try:
            found[number] = find_hosts(member)
        except ConfigError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(group)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    return [found[rank] for rank in range(len(group))]


def test_one_machine_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    met = {"a": "10.0.0.1", "localhost": "127.0.0.1"}
    for meeting in ("a", "localhost", ""):
        group = [Pretended("m", meeting=meeting, **met) for _ in range(2)]
        assert {one.addresses for one in agree(monkeypatch, *group)} == {("127.0.0.1",) * 2}
    # A setting of one rank is as good for its neighbours.
    group = [Pretended("m", meeting="a"), Pretended("m", meeting="a", given="10.0.0.1")]
    assert {one.addresses for one in agree(monkeypatch, *group)} == {("10.0.0.1",) * 2}


def test_the_host_of_the_meeting_place_takes_the_route_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own name is 127.0.1.1 there, and so is the route to where the ranks meet."""
    first = Pretended("m0", meeting="a", a="127.0.0.1", debian="127.0.0.1")
    first.routes["fd00::2"] = "fd00::1"
    second = Pretended("m1", meeting="a", a="fd00::2")
    found = agree(monkeypatch, first, second)
    assert {one.addresses for one in found} == {("fd00::1", "fd00::2")}


def test_what_cannot_be_reached_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [Pretended("m0", meeting=""), Pretended("m1", meeting="")]
    assert {"rank 0 on debian has no address" in one for one in agree(monkeypatch, *lost)} == {True}
    looped = [Pretended("m0", meeting="a", given="127.0.0.1"), Pretended("m1", meeting="a", a="b")]
    assert {"SAPWOOD_HOST is 127.0.0.1" in one for one in agree(monkeypatch, *looped)} == {True}
    twins = [Pretended(f"m{n}", meeting="a", a="172.17.0.2") for n in range(2)]
    assert {"both have the address 172.17.0.2" in o for o in agree(monkeypatch, *twins)} == {True}


# -- machines that are network namespaces ----------------------------------------------------


def advertised(srun: list[int] | None = None) -> tuple[str, str, tuple[str, ...]]:
    """How this rank was launched, where it met the others, and where all of them are."""
    if srun is not None:
        become_task(srun, ADDRESSES[: len(srun)])
    group = Group.join(torch.device("cpu"), timeout=30)
    try:
        return group.launch.launcher, group.meeting, find_hosts(group).addresses
    finally:
        group.leave(0)
        group.close()


@needs_machines
@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_torchrun(store: ranks.Store) -> None:
    found = ranks.spawn(advertised, 3, machines=[2, 1], store=store)
    expected = (ADDRESSES[0], ADDRESSES[0], ADDRESSES[1])
    assert found == [("torchrun", ADDRESSES[0], expected)] * 3


@needs_machines
def test_srun_where_a_nodes_own_name_is_loopback() -> None:
    found = ranks.spawn(advertised, 3, [1, 2], machines=[1, 2], store="rank0")
    expected = (ADDRESSES[0], ADDRESSES[1], ADDRESSES[1])
    assert found == [("srun", "node0", expected)] * 3


@needs_machines
def test_a_setting_one_machine_does_not_have_is_told_on_all() -> None:
    with pytest.raises(RankError, match=r"rank 1: SAPWOOD_HOST='10\.83\.0\.1' is no address"):
        ranks.spawn(advertised, 2, machines=[1, 1], env={hosts.HOST: ADDRESSES[0]})
    by_interface = ranks.spawn(advertised, 2, machines=[1, 1], env={hosts.HOST: "eth0"})
    assert by_interface[0][2] == (ADDRESSES[0], ADDRESSES[1])


RANK = """
import sys
from tests.runtime.test_hosts import advertised
sys.stdout.write(f"{advertised()}\\n")
"""
# What hydra calls in place of ssh: options, a host, and what to run there.
SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter --target="$(sed -n "s/^$host //p" "$MACHINES")" --net -- sh -c "$*"
"""


@needs_machines
@pytest.mark.skipif(not MPIRUN.exists(), reason="MPICH's mpirun is not installed")
def test_mpirun_without_a_meeting_point(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o700)
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "MACHINES": str(tmp_path / "machines"),
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src"), *sys.path]),
        "GLOO_SOCKET_IFNAME": "eth0",
        # UCX tells machines apart by their boot, which namespaces share.
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
    }
    with Machines(2) as machines:
        pids = [machines.namespace(n).split("/")[2] for n in range(2)]
        table = zip(ADDRESSES, pids, strict=False)
        (tmp_path / "machines").write_text("".join(f"{a} {pid}\n" for a, pid in table))
        launcher = ["-iface", "eth0", "-launcher", "ssh", "-launcher-exec", str(shell)]
        ours = ["-hosts", ",".join(ADDRESSES[:2]), "-ppn", "1", "-n", "2", sys.executable]
        command = machines.command(0, [str(MPIRUN), *launcher, *ours, "-c", RANK])
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = str(("mpirun", ADDRESSES[0], (ADDRESSES[0], ADDRESSES[1])))
    assert done.stdout.splitlines() == [expected] * 2


def test_what_rank_0_of_mpirun_tells_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names all addresses of the machine, of which there may be hundreds."""
    many = {f"10.0.{n // 200}.{n % 200}": f"br-\u00e9{n}" for n in range(400)}
    monkeypatch.setattr(hosts, "own_addresses", lambda: many)
    monkeypatch.setenv(hosts.HOST, "192.0.2.1")
    with ExitStack() as opened:
        offer = mpimeeting._offer(opened)
    assert offer[0].startswith("rank 0: SAPWOOD_HOST='192.0.2.1' is no address of this machine")
    assert len(json.dumps(offer)) <= mpimeeting._TEXT_BYTES


def test_rank_0_of_mpirun_is_looked_for_where_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that another machine has as well answers, but not as rank 0."""
    with mpimeeting._Trial("127.0.0.1", "right") as trial:
        assert mpimeeting._answers("127.0.0.1", trial.port, "right")
        assert not mpimeeting._answers("127.0.0.1", trial.port, "wrong")
    assert not mpimeeting._answers("127.0.0.1", trial.port, "right")
    monkeypatch.setattr(mpimeeting, "own_addresses", lambda: {"10.1.2.3": "ib0"})
    names(monkeypatch, {socket.getfqdn(): ["127.0.1.1"]})
    assert mpimeeting._own() == ["10.1.2.3", "127.0.0.1"]
