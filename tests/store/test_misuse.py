"""What strangers do to a repository: odd values, odd targets, forks in the middle of something."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sapwood.store
from sapwood.errors import BadName, ConfigError, DoesNotFit, ModelNotFound, StoreError, Unreachable
from sapwood.repository.database import Database


@pytest.fixture
def repo(tmp_path: Path):
    with sapwood.store.open(tmp_path / "models") as repository:
        yield repository


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4.0)[::4],
        torch.arange(12.0).reshape(3, 4)[:, ::4][1:2, :],
        torch.tensor([1 + 2j, 3 + 4j]).conj().imag[:1],
        torch.arange(6).reshape(2, 3).t()[:, :1].t(),
        torch.zeros(0, 3).t(),
        torch.tensor(5).expand(()),
    ],
)
def test_strides_of_tensors_of_one_element_do_not_matter(repo, tensor: torch.Tensor) -> None:
    repo.save({"w": tensor}, "a@1")
    back = repo.load("a@1")["w"]
    assert back.dtype == tensor.dtype
    assert back.tolist() == tensor.tolist()
    assert repo.save({"w": tensor}, "a@2", parent="a@1").nbytes == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tags": "best"}, r"tags=\['best'\]"),
        ({"tags": [None]}, "is text, not None"),
        ({"metrics": {"x": 10**400}}, "expected a number"),
        ({"metrics": [("x", 1)]}, "expected numbers by name"),
        ({"note": [1]}, "expected a dictionary"),
        ({"note": {"a": object()}}, "JSON"),
        ({"note": {"a": float("nan")}}, "JSON"),
        ({"files": [b"x"]}, "expected bytes by name"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is(
    repo, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises((BadName, ConfigError), match=message):
        repo.save({"w": torch.ones(2)}, "a@1", **wrong)
    with pytest.raises(ModelNotFound):
        repo.info("a")


def test_tags_and_layers_that_are_no_text_are_refused(repo) -> None:
    repo.save({"w": torch.ones(2)}, "a@1")
    with pytest.raises(BadName, match="text"):
        repo.tag("a@1", None)
    with pytest.raises(ConfigError, match="layers=0"):
        repo.load("a@1", layers=0)
    with pytest.raises(ConfigError, match="layers="):
        repo.load("a@1", layers=["w", 0])
    with pytest.raises(ConfigError, match="into= is a list"):
        repo.load("a@1", into=[torch.ones(2)])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(1).expand(3), "share memory"),
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3).to_sparse(), "only dense"),
    ],
)
def test_tensors_that_nothing_can_be_copied_into_are_listed_first(
    repo, target: torch.Tensor, message: str
) -> None:
    repo.save({"a": torch.ones(3), "b": torch.ones(3)}, "m@1")
    first = torch.zeros(3)
    with pytest.raises(DoesNotFit, match=f"b: .*{message}"):
        repo.load("m@1", into={"a": first, "b": target})
    assert first.tolist() == [0, 0, 0]


def test_modules_without_memory_are_refused(repo) -> None:
    repo.save(nn.Linear(4, 2), "m@1")
    with pytest.raises(DoesNotFit, match=r"weight: .*meta device"):
        repo.load("m@1", into=nn.Linear(4, 2, device="meta"))
    with pytest.raises(DoesNotFit, match=r"weight: .*not initialised"):
        repo.load("m@1", into=nn.LazyLinear(2))


def test_a_fork_in_the_middle_of_saves_and_merges_is_not_stuck(repo) -> None:
    many = {f"t{i}": torch.full((i % 7,), i) for i in range(400)}
    over = threading.Event()

    def save() -> None:
        while not over.is_set():
            repo.save(many, "busy")

    thread = threading.Thread(target=save)
    thread.start()
    try:
        ended = [_saves(repo, f"forked@{i}") for i in range(6)]
    finally:
        over.set()
        thread.join()
    assert ended == [0] * 6
    assert len(repo.models("forked")) == 6


def _saves(repo, name: str) -> int:
    child = os.fork()
    if not child:
        signal.alarm(40)  # a child that is stuck ends all the same
        try:
            repo.save({"w": torch.ones(3)}, name)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_settings_that_would_do_nothing_are_refused(repo) -> None:
    model = nn.Linear(4, 2)
    repo.save(model, "a@1", sample=torch.ones(1, 4), metrics={"loss": 1.0})
    for call in (
        lambda: repo.load("a@1", strict=False),
        lambda: repo.load("a@1", cast=True),
    ):
        with pytest.raises(ConfigError, match="into="):
            call()
    with pytest.raises(ConfigError, match="by="):
        repo.find("loss > 0", lower=True)
    with pytest.raises(ConfigError, match="by="):
        repo.best_ancestor(model, torch.ones(1, 4), lower=True)
    with pytest.raises(ConfigError, match="names it"):
        repo.transfer(model, "a@1", torch.ones(1, 4), by="loss")


@pytest.mark.parametrize(
    "setting", [{"timeout": -1}, {"timeout": "soon"}, {"timeout": 1e300}, {"staging": "sometimes"}]
)
def test_settings_of_providers_are_looked_at_before_anything_is_sent(
    setting: dict[str, Any],
) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name}="):
        sapwood.store.open("sapwood://127.0.0.1:1", token="a-token-of-these-tests", **setting)


def test_a_silent_server_may_want_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"sapwood://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match="tls_ca"):
            sapwood.store.open(address, token="a-token-of-these-tests", timeout=0.5)


def test_a_catalog_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="may be written to"):
        Database(tmp_path / "not there" / "catalog.db")
    sqlite3.connect(tmp_path / "catalog.db").close()
    database = Database(tmp_path / "catalog.db")
    try:
        database._open().execute("PRAGMA query_only=ON")  # as a file system that is read-only does
        with (
            pytest.raises(StoreError, match="may be written to"),
            database.writing() as connection,
        ):
            connection.execute("CREATE TABLE more (x)")
    finally:
        database.close()
