"""Forks that cannot be: clear words for the clones, and a donor that goes on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.clone.address import Address
from sapwood.clone.listener import ask
from sapwood.clone.manifest import versions
from sapwood.clone.order import ENV, ForkOrder
from sapwood.errors import CloneError
from sapwood.testing import faults, ranks
from sapwood.testing.faults import env as faulty
from tests.clone.forking import (
    MORE,
    donate,
    donors,
    failed_with,
    home_of,
    order,
    receive,
    stop,
)


def a_fork_still_works(folder: Path, world: int = 2) -> None:
    clones = ranks.spawn(receive, world, folder / "again", env=order(home_of(folder)))
    assert {clone["parent"] for clone in clones} == {home_of(folder).name}


def test_a_wrong_token(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 32)
    with donors(tmp_path, 1) as group:
        address = Address.read(home_of(tmp_path))
        lie = Address(
            host=address.host, port=address.port, node=address.node, token_file=str(wrong)
        )
        env = {ENV: ForkOrder(address=lie).encode()}
        assert "does not take the token" in failed_with(tmp_path / "clone", 1, env)
        with pytest.raises(CloneError, match="cannot read the run's token"):
            ask(Address(host="", port=1, node="", token_file="/nowhere/token"), {})
        a_fork_still_works(tmp_path, 1)
        (seen,) = stop(tmp_path, group)
    assert len(seen["forks"]) == 1


def test_other_versions(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        address = Address.read(home_of(tmp_path))
        request = {"versions": {**versions(), "sapwood": "0.0.0"}, "places": [["here", "cpu", "m"]]}
        with pytest.raises(CloneError, match=r"the clones sapwood 0\.0\.0"):
            ask(address, request)
        for nonsense in ({}, {"versions": versions()}, {"versions": versions(), "places": []}):
            with pytest.raises(CloneError, match="the run refuses"):
                ask(address, nonsense)
        stop(tmp_path, group)


def other_model(folder: Path) -> None:
    model = torch.nn.Linear(3, 5)
    sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=folder)


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    with donors(tmp_path, 2) as group:
        with pytest.raises(sapwood.SapwoodError) as caught:
            ranks.spawn(other_model, 2, tmp_path / "clone", env=order(home_of(tmp_path)))
        assert "has another model" in str(caught.value)
        for name in ("conv.weight", "head.bias", "model weight", "model bias"):
            assert name in str(caught.value)
        a_fork_still_works(tmp_path)
        seen = stop(tmp_path, group)
    assert [done for _, done, _, _ in seen[0]["forks"]] == [False, True]


def test_a_run_that_ended(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        home = home_of(tmp_path)
        late = order(home)
        stop(tmp_path, group)
    assert "token" in failed_with(tmp_path / "clone", 1, late)
    with pytest.raises(CloneError, match="takes no clones"):
        Address.read(home)
    assert not (home / "token").exists()


def test_nonsense_in_the_environment(tmp_path: Path) -> None:
    assert "not by `sapwood fork`" in failed_with(tmp_path, 1, {ENV: json.dumps({"a": 1})})


def test_an_override_that_leads_nowhere(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        home = home_of(tmp_path)
        env = order(home, overrides={"optimizer.rl": 0.1})
        message = failed_with(tmp_path / "clone", 1, env)
        assert "optimizer.rl leads nowhere" in message
        assert "weight_decay" in message
        for path, value, text in (
            ("optimizer.lr", -1, "optimizer.lr is -1, expected a number, 0 or more"),
            ("optimiser.lr", 0.1, "did you mean optimizer.lr?"),
            ("scheduler.T_max", 10, "a fork goes on with its parent's schedules"),
        ):
            env = order(home, overrides={path: value})
            assert text in failed_with(tmp_path / "clone", 1, env)
        (seen,) = stop(tmp_path, group)
    assert seen["forks"] == [], "the donors were not even asked"


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        message = failed_with(tmp_path / "clone", 1, order(home_of(tmp_path)), kind="sgd")
        wanted = "the run trains with torch.optim.AdamW, this script has torch.optim.SGD"
        assert wanted in message
        a_fork_still_works(tmp_path, 1)
        (seen,) = stop(tmp_path, group)
    (_, done, failure, waited), (_, again, _, _) = seen["forks"]
    assert (done, again, waited) == (False, True, 0.0)
    assert wanted in failure


def test_a_rate_the_schedule_cannot_go_on_from_is_refused_before_it_begins(tmp_path: Path) -> None:
    """Only the forked step's own state tells: the groups' rates would change differently."""
    with ranks.start(donate_with_a_floor, 1, tmp_path) as group:
        group.wait_mark("open", rank=0, timeout=60)
        home = home_of(tmp_path)
        env = order(home, overrides={"optimizer.1.lr": 0.5})
        with pytest.raises(sapwood.SapwoodError) as caught:
            ranks.spawn(with_a_floor, 1, tmp_path / "clone", env=env)
        assert "has one eta_min (0.001) for all parameter groups" in str(caught.value)
        (seen,) = stop(tmp_path, group)
    ((done, failure),) = seen
    assert not done
    assert "has one eta_min" in failure


def with_a_floor(folder: Path) -> sapwood.Run:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": list(part.parameters())} for part in model]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000, eta_min=1e-3)
    return sapwood.Run(model, optimizer, schedulers=[scheduler], folder=folder / "runs")


def donate_with_a_floor(folder: Path) -> list[tuple[bool, str]]:
    run = with_a_floor(folder)
    run.allow_clones()
    ranks.mark("open")
    while not (folder / "stop").exists():
        run.model(torch.ones(2, 3)).sum().backward()
        run.step()
        time.sleep(0.005)
    forks = run.forks
    run.close()
    return [(f.done, f.failure) for f in forks]


# -- clones and donors that die or stop ------------------------------------------------------


POINTS = ["clone.arrived:kill@1", "clone.arrived:kill@3", "clone.verified:kill"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_a_clone_is_killed_and_the_donors_go_on(tmp_path: Path, point: str, transport: str) -> None:
    with donors(tmp_path, 2, patience=1.0, join_timeout=5.0) as group:
        home = home_of(tmp_path)

        def environment(rank: int) -> dict[str, str]:
            return order(home, transport=transport) | (faulty(point) if rank == 1 else {})

        with ranks.start(receive, 2, tmp_path / "clone", env=environment) as clones:
            outcomes = clones.wait(timeout=60)
        assert outcomes[1].signal == signal.SIGKILL
        assert outcomes[0].error is not None
        a_fork_still_works(tmp_path)
        seen = stop(tmp_path, group)
    for donor in seen:
        (_, done, failure, waited), (_, again, _, _) = donor["forks"]
        assert not done
        assert failure
        assert again
        assert waited < 5


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "it was never stopped"
        time.sleep(0.02)


@pytest.mark.parametrize("approach", ["deepclone", "p2p"])
def test_a_stopped_clone_is_given_up_within_the_bound(tmp_path: Path, approach: str) -> None:
    options: dict[str, Any] = {"patience": 0.5, "join_timeout": 4.0, "send_timeout": 20.0}
    with donors(tmp_path, 2, **options) as group:
        home = home_of(tmp_path)
        env = order(home, approach=approach) | faulty("clone.arrived:stop@2")
        with ranks.start(receive, 2, tmp_path / "clone", env=env) as clones:
            for pid in clones.pids:
                until_stopped(pid)
            a_fork_still_works(tmp_path)
            seen = stop(tmp_path, group)
            for rank in range(2):
                clones.kill(rank, signal.SIGKILL)
            clones.wait(timeout=30)
    for donor in seen:
        assert [done for _, done, _, _ in donor["forks"]] == [False, True]
        assert all(waited < 4 for _, _, _, waited in donor["forks"])
        assert donor["slowest"] < 10, "a step waited longer than the donors' patience"


def test_donors_that_die_in_mid_fork_take_no_clone_along_unnoticed(tmp_path: Path) -> None:
    def environment(rank: int) -> dict[str, str]:
        return faulty("clone.send:kill@2") if rank == 1 else {}

    with ranks.start(donate, 2, tmp_path, env=environment) as group:
        for rank in range(2):
            group.wait_mark("open", rank=rank, timeout=60)
        message = failed_with(tmp_path / "clone", 2, order(home_of(tmp_path)))
        group.wait(timeout=60)
    assert "CloneError" in message or "clone" in message


def test_a_late_clone_is_not_waited_for(tmp_path: Path) -> None:
    """It asks, and then nothing is heard of it."""
    with donors(tmp_path, 2, join_timeout=1.0) as group:
        home = home_of(tmp_path)
        ask(Address.read(home), {"versions": versions(), "places": [["here", "cpu", "m"]]})
        a_fork_still_works(tmp_path)
        time.sleep(1.5)  # the fork that works may be done before the other is given up
        seen = stop(tmp_path, group)
    for donor in seen:
        (_, done, failure, waited), (_, again, _, _) = donor["forks"]
        assert (done, again, waited) == (False, True, 0.0)
        assert "waiting for the clones" in failure
        assert len(donor["losses"]) > MORE


def test_a_stopped_donor_is_not_waited_for_without_end(tmp_path: Path) -> None:
    def environment(rank: int) -> dict[str, str]:
        return faulty("clone.send:stop@2") if rank == 1 else {}

    with ranks.start(donate, 2, tmp_path, env=environment) as group:
        for rank in range(2):
            group.wait_mark("open", rank=rank, timeout=60)
        env = order(home_of(tmp_path)) | {"SAPWOOD_CLONE_STEP_TIMEOUT": "3"}
        assert "clone" in failed_with(tmp_path / "clone", 2, env)
        group.kill(1, signal.SIGCONT)
        seen = stop(tmp_path, group)
    assert [done for _, done, _, _ in seen[0]["forks"]] == [False]


# -- through a file --------------------------------------------------------------------------


def change_when_written(folder: Path) -> None:
    """Flip a byte of the model's file, once it has all of them, before the clones read it."""
    path = next((folder / "runs").glob("*/clones/*/model.safetensors"))
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def donate_changed(folder: Path) -> dict[str, Any]:
    with faults.inject("clone.filed", lambda: change_when_written(folder)):
        return donate(folder)


def test_a_file_that_was_changed_is_no_state(tmp_path: Path) -> None:
    with ranks.start(donate_changed, 1, tmp_path) as group:
        group.wait_mark("open", rank=0, timeout=60)
        env = order(home_of(tmp_path), approach="file")
        message = failed_with(tmp_path / "clone", 1, env)
        assert "model.safetensors was changed after it was written" in message
        (seen,) = stop(tmp_path, group)
    ((_, done, failure, _),) = seen["forks"]
    assert not done
    assert "was changed" in failure
    assert not list(tmp_path.rglob("clones"))


def test_a_slow_disk_holds_up_no_donor(tmp_path: Path) -> None:
    slow = faulty("clone.write:sleep:0.4@*")
    with ranks.start(donate, 1, tmp_path, patience=0.5, env=slow) as group:
        group.wait_mark("open", rank=0, timeout=60)
        message = failed_with(tmp_path / "clone", 1, order(home_of(tmp_path), approach="file"))
        assert "raise patience=, or use another approach" in message
        a_fork_still_works(tmp_path, 1)
        (seen,) = stop(tmp_path, group)
    assert [done for _, done, _, _ in seen["forks"]] == [False, True]
    assert not list(tmp_path.rglob("clones"))


def test_a_disk_that_hangs_holds_up_no_donor(tmp_path: Path) -> None:
    """As a file server does that is gone: not even a limit between two writes is looked at."""
    hangs = faulty("clone.write:sleep:1000")
    with ranks.start(donate, 1, tmp_path, patience=0.5, env=hangs) as group:
        group.wait_mark("open", rank=0, timeout=60)
        message = failed_with(tmp_path / "clone", 1, order(home_of(tmp_path), approach="file"))
        assert "raise patience=, or use another approach" in message
        a_fork_still_works(tmp_path, 1)
        (seen,) = stop(tmp_path, group)
    assert [done for _, done, _, _ in seen["forks"]] == [False, True]
