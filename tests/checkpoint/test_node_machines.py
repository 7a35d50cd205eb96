"""Nodes that keep for each other, each on a machine of its own: nothing is reached by loopback."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.checkpoint import nodes
from sapwood.errors import RankError
from sapwood.testing import ranks
from tests.checkpoint.training import Training, same
from tests.hosts import become_task
from tests.marks import needs_machines

ADDRESSES = ["10.83.0.1", "10.83.0.2", "10.83.0.3"]
STEPS = 4


def work(folder: Path, sizes: list[int], tier: str, until: int) -> dict[str, Any]:
    """Go on, as a task of srun, from what this node and the others have."""
    node = become_task(sizes, ADDRESSES[: len(sizes)])
    training = Training(folder)
    training.rank = training.run.rank
    own = folder / f"disk{node}"
    settings: dict[str, Any] = {"every": 2, "linger": 0.0, "mode": "lazy"}
    with sapwood.Checkpointer(training.run, own, tiers=(f"local:{own}", tier), **settings) as c:
        loaded = c.restore_latest()
        training.steps(until)
        c.wait()
        assert not any(save.failed for save in c.stats.saves)
        addresses = dict(c._nodes.addresses)
        strangers = reached_by_loopback(addresses)
    found = {
        "began": 0 if loaded is None else loaded.id.step,
        "state": training.state(),
        "addresses": addresses,
        "strangers": strangers,
    }
    training.close()
    return found


def reached_by_loopback(addresses: dict[str, str]) -> list[str]:
    """The engines that listen on more than the address they advertise."""
    found = []
    for address in addresses.values():
        try:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()
        except ConnectionRefusedError:
            continue
        found.append(address)
    return found


@needs_machines
@pytest.mark.parametrize(("sizes", "tier"), [([2, 1], "partner"), ([1, 1, 1], "parity:2+1")])
def test_a_lost_machine_comes_back_from_the_others(
    tmp_path: Path, sizes: list[int], tier: str
) -> None:
    def trained(until: int) -> list[dict[str, Any]]:
        where: dict[str, Any] = {"machines": sizes, "store": "rank0"}
        return ranks.spawn(work, 3, tmp_path, sizes, tier, until, **where)

    first = trained(STEPS)
    hosts = [one.rpartition(":")[0] for one in first[0]["addresses"].values()]
    assert hosts == ADDRESSES[: len(sizes)]
    assert [one["strangers"] for one in first] == [[]] * 3
    lost = len(sizes) - 1
    for node in range(len(sizes)):
        kept = [p for p in (tmp_path / f"disk{node}").rglob("kept/**/*") if p.is_file()]
        assert kept, f"node {node} keeps nothing for the others"
    shutil.rmtree(tmp_path / f"disk{lost}")
    again = trained(STEPS)
    for before, after in zip(first, again, strict=True):
        assert after["began"] == STEPS
        assert same(before["state"], after["state"])


def same_name(folder: Path) -> None:
    with_nodes = Training(folder)
    try:
        nodes.find_nodes(with_nodes.run.group)
    finally:
        with_nodes.close()


@needs_machines
def test_machines_of_one_name_are_told_apart_by_the_user(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks 0 and 1 are on different machines.*SAPWOOD_NODE"):
        ranks.spawn(same_name, 2, tmp_path, machines=[1, 1])
