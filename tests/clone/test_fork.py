"""A fork is its donor's twin, bit for bit, and the donor does not notice."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path

import pytest

from sapwood.cli.folders import list_runs
from sapwood.clone.address import Address
from sapwood.clone.listener import ask
from sapwood.testing import ranks, workloads
from tests.clone.forking import donors, goes_on_like, home_of, order, receive, stop


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_as_many_clones_as_donors_go_on_alike(tmp_path: Path, world: int) -> None:
    with donors(tmp_path, world) as group:
        clones = ranks.spawn(receive, world, tmp_path, env=order(home_of(tmp_path)))
        seen = stop(tmp_path, group)
    for clone, donor in zip(clones, seen, strict=True):
        assert goes_on_like(clone, donor)
        assert [(step, done) for step, done, _, _ in donor["forks"]] == [(clone["step"], True)]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_every_workload_goes_on_alike(tmp_path: Path, name: str) -> None:
    with donors(tmp_path, 2, name) as group:
        clones = ranks.spawn(receive, 2, tmp_path, name, env=order(home_of(tmp_path)))
        seen = stop(tmp_path, group)
    for clone, donor in zip(clones, seen, strict=True):
        assert goes_on_like(clone, donor)


@pytest.mark.parametrize(("donating", "cloning"), [(1, 3), (3, 1), (2, 3), (4, 2)])
def test_other_numbers_of_clones_begin_with_the_same_state(
    tmp_path: Path, donating: int, cloning: int
) -> None:
    with donors(tmp_path, donating) as group:
        clones = ranks.spawn(receive, cloning, tmp_path, env=order(home_of(tmp_path)))
        seen = stop(tmp_path, group)
    for rank, clone in enumerate(clones):
        assert clone["weights"] == seen[0]["weights"][clone["step"]]
        if rank < donating:
            assert clone["first"] == seen[rank]["states"][clone["step"]]


@pytest.mark.parametrize("approach", ["lazy", "p2p", "file"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_other_approaches(tmp_path: Path, approach: str, kind: str) -> None:
    with donors(tmp_path, 2, kind, approach=approach) as group:
        clones = ranks.spawn(receive, 2, tmp_path, kind, env=order(home_of(tmp_path)))
        seen = stop(tmp_path, group)
    for clone, donor in zip(clones, seen, strict=True):
        assert goes_on_like(clone, donor)
    assert not list(tmp_path.rglob("clones"))


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi", "mooncake"])
def test_every_transport(tmp_path: Path, transport: str) -> None:
    if transport == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with donors(tmp_path, 2) as group:
        env = order(home_of(tmp_path), transport=transport)
        clones = ranks.spawn(receive, 2, tmp_path, env=env)
        seen = stop(tmp_path, group)
    for clone, donor in zip(clones, seen, strict=True):
        assert goes_on_like(clone, donor)


def test_several_forks_at_once_each_with_its_own_changes(tmp_path: Path) -> None:
    with donors(tmp_path, 2) as group:
        home = home_of(tmp_path)
        started = [
            ranks.start(
                receive, 1, tmp_path / str(n), env=order(home, overrides={"optimizer.lr": rate})
            )
            for n, rate in enumerate((0.5, 0.3))
        ]
        found = []
        for clones in started:
            with clones:
                (outcome,) = clones.wait(timeout=60)
                assert outcome.error is None, outcome.error
                found.append(outcome.value)
        seen = stop(tmp_path, group)
    assert [f["rates"][0] < 0.5 for f in found] == [True, True]
    assert found[0]["rates"] != found[1]["rates"]
    assert sorted(step for step, done, _, _ in seen[0]["forks"] if done) == sorted(
        f["step"] for f in found
    )


def test_clones_that_stand_by_begin_when_they_are_told_to(tmp_path: Path) -> None:
    with donors(tmp_path, 2) as group:
        home = home_of(tmp_path)
        env = order(home, standby=True)
        with ranks.start(receive, 2, tmp_path / "clone", env=env) as clones:
            address = Address.read(home)
            while not ask(address, {"op": "go"})["started"]:
                time.sleep(0.05)
            outcomes = clones.wait(timeout=60)
        assert ask(address, {"op": "go"}) == {"started": 0}
        seen = stop(tmp_path, group)
    for outcome, donor in zip(outcomes, seen, strict=True):
        assert goes_on_like(outcome.value, donor)


def test_a_clone_of_a_clone_and_the_tree_of_runs(tmp_path: Path) -> None:
    with donors(tmp_path, 1) as group:
        home = home_of(tmp_path)
        env = order(home, overrides={"optimizer.lr": 0.5, "data.seed": 7})
        with ranks.start(receive, 2, tmp_path / "second", serve=True, env=env) as second:
            for rank in range(2):
                second.wait_mark("open", rank=rank, timeout=60)
            below = home_of(tmp_path / "second")
            (third,) = ranks.spawn(receive, 1, tmp_path / "third", env=order(below))
            (tmp_path / "second" / "stop").touch()
            middle = [outcome.value for outcome in second.wait(timeout=60)]
        stop(tmp_path, group)
    facts = tomllib.loads((below / "run.toml").read_text())
    assert facts["parent"] == home.name
    assert facts["parent_step"] == middle[0]["step"]
    assert {k: json.loads(v) for k, v in facts["overrides"].items()} == {
        "optimizer.lr": 0.5,
        "data.seed": 7,
    }
    assert third["parent"] == middle[0]["id"]
    (last,) = list_runs(tmp_path / "third" / "runs")
    assert (last.parent, last.parent_step) == (middle[0]["id"], third["step"])
