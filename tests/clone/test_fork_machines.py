"""Forks from one machine to another; the machines have only their files in common."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli.folders import list_runs
from sapwood.clone.address import Address
from sapwood.clone.listener import ask
from sapwood.clone.order import ENV, ForkOrder
from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.host import machine_key
from sapwood.testing import ranks
from sapwood.testing.machines import Machines
from tests.cli.helpers import DEADLINE, environment
from tests.clone.forking import donate, goes_on_like, home_of, receive, until
from tests.hosts import become_task
from tests.marks import needs_machines

ADDRESSES = ["10.83.0.1", "10.83.0.2", "10.83.0.3"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "03_fork.py"


def alone(rank: int, first_clone: int) -> dict[str, str]:
    """The variables of one of two groups, both started as if each were the only one."""
    if rank < first_clone:
        return {"WORLD_SIZE": str(first_clone)}
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def play(folder: Path, donors: int, srun: bool = False, **settings: Any) -> Any:
    """A donor trains until it has been forked; the last rank is its clone."""
    if os.environ["WORLD_SIZE"] != "1" or os.environ["GROUP_RANK"] == "0":
        if srun:
            rank = os.environ["RANK"]
            become_task([1] * donors, ADDRESSES[:donors])
            os.environ.update(RANK=rank)  # without WORLD_SIZE this says nothing to Sapwood
        return donate(folder, **settings)
    until(lambda: list((folder / "runs").glob("*/address")), "a run that takes clones")
    os.environ[ENV] = ForkOrder(address=Address.read(home_of(folder))).encode()
    try:
        return receive(folder)
    except CloneError as error:
        return str(error)
    finally:
        (folder / "stop").touch()


@needs_machines
@pytest.mark.parametrize("way", ["variable", "setting", "interface"])
def test_a_training_on_one_machine_is_forked_from_another(tmp_path: Path, way: str) -> None:
    settings = {"host": ADDRESSES[0]} if way == "setting" else {}
    value = "eth0" if way == "interface" else ADDRESSES[0]

    def env(rank: int) -> dict[str, str]:
        given = {"SAPWOOD_HOST": value} if rank == 0 and not settings else {}
        # No interface is named: the transport listens on what its rank advertises.
        return {**alone(rank, 1), **given, "GLOO_SOCKET_IFNAME": ""}

    donor, clone = ranks.spawn(play, 2, tmp_path, 1, machines=[1, 1], env=env, **settings)
    assert goes_on_like(clone, donor)
    assert [(step, done) for step, done, _, _ in donor["forks"]] == [(clone["step"], True)]


@needs_machines
@pytest.mark.parametrize("srun", [False, True])
def test_a_training_that_spans_machines_is_forked_from_a_third(tmp_path: Path, srun: bool) -> None:
    """Nothing is set."""
    *donors, clone = ranks.spawn(
        play,
        3,
        tmp_path,
        2,
        srun,
        machines=[1, 1, 1],
        store="rank0",
        env=lambda rank: alone(rank, 2),
    )
    assert clone["first"] == donors[0]["states"][clone["step"]]
    assert clone["weights"] == donors[1]["weights"][clone["step"]]
    assert all(done for donor in donors for _, done, _, _ in donor["forks"])


@needs_machines
def test_a_training_that_keeps_to_itself_says_what_to_set(tmp_path: Path) -> None:
    _, told = ranks.spawn(play, 2, tmp_path, 1, machines=[1, 1], env=lambda rank: alone(rank, 1))
    assert "takes forks from its own machine only (127.0.0.1 of " in told
    assert "SAPWOOD_HOST, or host= of run.allow_clones" in told


def host_of_another(folder: Path) -> str:
    from tests.clone.forking import begin

    training = begin(folder, "adamw")
    try:
        training.run.allow_clones(host="203.0.113.9")
    except ConfigError as error:
        return str(error)
    finally:
        training.close()
    return ""


def test_a_host_the_machine_does_not_have_is_told_on_every_rank(tmp_path: Path) -> None:
    told = ranks.spawn(host_of_another, 2, tmp_path)
    assert len(set(told)) == 1
    assert "host='203.0.113.9' is no address of this machine" in told[0]
    assert "SAPWOOD_BIND" in told[0]


def test_the_nearest_way_to_a_listener() -> None:
    here, elsewhere = machine_key(), "another boot:1"
    facts: dict[str, Any] = {"port": 1, "node": "n", "token_file": "t"}
    for machine, host, bind, nearest in (
        (here, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (here, "10.0.0.1", "10.0.0.1", "10.0.0.1"),
        (here, "203.0.113.9", "0.0.0.0", "127.0.0.1"),
        (here, "2001:db8::1", "::", "::1"),
        (elsewhere, "203.0.113.9", "0.0.0.0", "203.0.113.9"),
        (elsewhere, "10.0.0.1", "10.0.0.1", "10.0.0.1"),
    ):
        address = Address(host=host, bind=bind, machine=machine, **facts)
        assert address.nearest == nearest
        address.check_reach()
    looped = Address(host="127.0.0.1", machine=elsewhere, **facts)
    with pytest.raises(CloneError, match="from its own machine only"):
        looped.check_reach()
    near = Address(host="127.0.0.1", machine=here, **facts)
    with pytest.raises(CloneError, match="from its own machine only"):
        near.check_reach([here, elsewhere])


def test_a_run_that_does_not_answer_on_another_machine_says_what_to_set(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        place: dict[str, Any] = {"port": bound.getsockname()[1], "node": "n"}
        gone = Address(host="127.0.0.1", token_file=str(token), machine=machine_key(), **place)
        with pytest.raises(CloneError, match=r"refused\); is it still running\?$"):
            ask(gone, {})
        elsewhere = Address(host="127.0.0.1", token_file=str(token), **place)
        with pytest.raises(CloneError, match=r"still running\? If so, .* with SAPWOOD_HOST"):
            ask(elsewhere, {})


@needs_machines
def test_the_command_line_forks_from_another_machine(tmp_path: Path) -> None:
    sapwood = [sys.executable, "-m", "sapwood.cli"]
    train = [*sapwood, "run", str(EXAMPLE), "--steps", "100000", "--pause", "0.05"]
    fork = [*sapwood, "fork", "latest", "--", str(EXAMPLE), "--steps", "1"]
    clones = environment(tmp_path, GLOO_SOCKET_IFNAME="")
    donors = {**clones, "SAPWOOD_HOST": ADDRESSES[0]}
    with (
        Machines(2) as machines,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            machines.command(0, train), cwd=tmp_path, env=donors, stdout=log, stderr=log
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while not list((tmp_path / "runs").glob("*/address")):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            done = subprocess.run(
                machines.command(1, fork),
                cwd=tmp_path,
                env=clones,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
        finally:
            process.terminate()
            process.wait(30)
    assert done.returncode == 0, done.stderr
    parent, child = sorted(list_runs(tmp_path / "runs"), key=lambda run: bool(run.parent))
    assert child.parent == parent.id
