"""Where memory cannot be shared: all ranks average directly, or all refuse, and say why."""

from __future__ import annotations

import os
import resource
import socket
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import sapwood
from sapwood.buffers import Arena, mapping
from sapwood.errors import ConfigError
from sapwood.runtime import machines
from sapwood.runtime.group import Group
from sapwood.sync.averaging import choose_averager
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.sync import models

CPU = torch.device("cpu")
LONG = 300.0  # nobody may need a timeout to find out
MODEL_BYTES = 4 << 20


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


@contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def without(place: Any, name: str) -> Iterator[None]:
    before = getattr(place, name)
    delattr(place, name)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def small_files() -> Iterator[None]:
    """memfds count as files: a limit on those only shows with as many bytes as the model has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MODEL_BYTES // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def unmappable() -> Iterator[None]:
    """Making memory works, mapping a neighbour's does not."""
    attach = Arena.attach

    def attach_nothing(fd: int) -> Arena:
        with replaced(mapping, "_map_at", refuse):
            return attach(fd)

    with replaced(Arena, "attach", attach_nothing):
        yield


@contextmanager
def no_sockets_of_unix() -> Iterator[None]:
    # torch and Python keep theirs: only who asks the module again finds none.
    with without(socket, "AF_UNIX"):
        yield


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no abstract socket": (lambda: replaced(machines, "_listener", refuse), "not permitted"),
    "no AF_UNIX": (no_sockets_of_unix, "AF_UNIX"),
    "no memfd": (lambda: replaced(os, "memfd_create", refuse), "not permitted"),
    "no memfd in this Python": (lambda: without(os, "memfd_create"), "memfd_create"),
    "a limit on the size of files": (small_files, "File too large"),
    "memory cannot be mapped": (unmappable, "not permitted"),
}


def choose(wanted: Any) -> tuple[str, str]:
    group = Group.join(CPU, timeout=LONG)
    try:
        chosen = choose_averager(group, wanted, nbytes=MODEL_BYTES)
        try:
            memory = chosen.averager.lay_out([(2, torch.float32)])
            memory[0].contribution.fill_(1.0)
            chosen.averager.launch(0, "a bucket").wait()
            assert memory[0].average.tolist() == [3.0, 3.0]
        finally:
            chosen.averager.close()
        return chosen.averager.name, chosen.reason
    except ConfigError as error:
        return "refused", str(error)
    finally:
        group.close()


def held() -> int:
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd" in str(one.readlink())
    return found


def try_all(folder: Path) -> dict[str, list[tuple[str, str]]]:
    found = {"nothing": [choose("auto"), choose("node")]}
    for number, (name, (fault, _)) in enumerate(FAULTS.items()):
        ways = []
        for wanted in ("auto", "node"):
            if rank() != number % 3:  # one rank alone has it, each in its turn
                ways.append(choose(wanted))
            else:
                with fault():
                    ways.append(choose(wanted))
        found[name] = ways
    assert held() == 0
    found["Run"] = [train(folder, "auto")]
    return found


def train(folder: Path, wanted: str) -> tuple[str, str]:
    """A whole training whose rank 1 cannot make memory, and what its folder says."""
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank() == 1:
        os.memfd_create = refuse
    with sapwood.Run(model, optimizer, averaging=wanted, folder=folder, timeout=LONG) as run:
        for step in range(3):
            models.train_run_step(run, step)
    layout = tomllib.loads((run.folder / "run.toml").read_text())["layout"]
    return layout["averaging"], layout["averaging_reason"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[tuple[str, str]]]]:
    return ranks.spawn(try_all, 3, tmp_path_factory.mktemp("runs"), timeout=120)


def test_without_a_fault_memory_is_shared(told: list[dict[str, Any]]) -> None:
    assert {tuple(one["nothing"]) for one in told} == {(("node", "1 machine: 0-2"),) * 2}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_fall_back_or_refuse_together(told: list[dict[str, Any]], fault: str) -> None:
    assert len({tuple(one[fault]) for one in told}) == 1
    (way, reason), (refused, error) = told[0][fault]
    where = f"rank {list(FAULTS).index(fault) % 3}: "
    assert way == "direct"
    assert FAULTS[fault][1] in reason
    assert where in reason
    assert refused == "refused"
    assert where in error
    assert "use averaging='direct'" in error


def test_a_run_records_why_it_fell_back(told: list[dict[str, Any]]) -> None:
    assert len({tuple(one["Run"]) for one in told}) == 1
    ((way, reason),) = told[0]["Run"]
    assert way == "direct"
    assert reason.startswith("rank 1: ")
