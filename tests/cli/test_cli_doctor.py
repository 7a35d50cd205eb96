from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tomllib
from pathlib import Path

import pytest

from sapwood.cli.checks import machine, software
from sapwood.cli.checks.base import Check, note, ok, problem
from sapwood.cli.main import main
from sapwood.cli.verbs import doctor as verb
from sapwood.runtime.launch import check_system
from tests.cli.helpers import sapwood

HERE = Path("runs")
ROOT = Path(__file__).parents[2]


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_this_machine_is_looked_at_and_told_in_json(tmp_path):
    done = sapwood("doctor", "--json", tmp_path=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert set(checks) >= {"python", "torch", "backends", "cores", "memory", "launcher", "network"}
    assert checks["averaging in memory"]["state"] == "ok"
    assert checks["torch"]["state"] == "ok"
    assert "gloo yes" in checks["backends"]["found"]
    assert done.returncode == int(any(c["state"] == "problem" for c in checks.values()))
    assert list(tmp_path.iterdir()) == [tmp_path / "tmp"]


@pytest.mark.parametrize(
    ("checks", "code"), [([ok("a", "x"), note("b", "y", "z")], 0), ([problem("c", "x", "y")], 1)]
)
def test_the_exit_code_says_whether_there_is_a_problem(monkeypatch, capsys, checks, code):
    monkeypatch.setattr(verb, "ALL", [lambda folder, check=check: check for check in checks])
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert all(check.found in text for check in checks)
    assert all(f"-> {check.remedy}" in text for check in checks if check.remedy)


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch, capsys):
    def broken(folder: Path) -> Check:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(verb, "ALL", [broken, lambda folder: ok("fine", "yes")])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ZeroDivisionError: oh" in text
    assert "fine" in text


def test_memory_is_shared_for_real_and_given_back():
    before = open_files()
    check = machine.memory_between_ranks(HERE)
    assert (check.state, check.remedy) == ("ok", None)
    assert open_files() == before


@pytest.mark.parametrize(
    ("module", "name"), [(os, "memfd_create"), (socket, "send_fds"), (socket, "socket")]
)
def test_memory_that_cannot_be_shared_is_noted(monkeypatch, module, name):
    def refuse(*args, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module, name, refuse)
    check = machine.memory_between_ranks(HERE)
    assert check.state == "note"
    assert "Operation not permitted" in check.found
    assert check.remedy
    assert "loopback" in check.remedy
    # But checkpoints have no other memory to be staged in.
    expected = "problem" if name == "memfd_create" else "ok"
    assert machine.staging(HERE).state == expected


def test_a_descriptor_that_is_dropped_on_the_way_is_noted(monkeypatch):
    def without(link, data, descriptors, flags=0):
        return link.send(data[0], flags)

    monkeypatch.setattr(socket, "send_fds", without)
    assert machine.memory_between_ranks(HERE).state == "note"


def test_ranks_that_cannot_tell_their_machine_are_noted(monkeypatch):
    monkeypatch.setattr(machine, "_MACHINE_FILES", ("/proc/nosuch",))
    check = machine.memory_between_ranks(HERE)
    assert check.state == "note"
    assert "/proc/nosuch" in check.found


def test_a_wrong_interface_for_gloo_is_a_problem(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    check = machine.gloo_interface(HERE)
    assert check.state == "problem"
    assert check.remedy
    assert "lo" in check.remedy


def test_a_half_set_launcher_is_a_problem(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert machine.launcher(HERE).state == "problem"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    check = machine.runs_folder(tmp_path / "runs")
    assert check.state == "problem"
    assert "Permission denied" in check.found


def test_a_full_disk_below_the_folder_for_runs_is_a_problem(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    for free, state in ((0, "problem"), (64 << 20, "note"), (8 << 30, "ok")):
        monkeypatch.setattr(
            machine.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        assert machine.runs_folder(tmp_path / "runs").state == state


def test_missing_extras_come_with_the_command(monkeypatch):
    monkeypatch.setattr(software, "_installed", lambda package: package in ("cyclopts", "rich"))
    check = software.extras(HERE)
    assert check.state == "note"
    assert check.found == "installed: cli"
    missing = "checkpoint,compression,parity,s3,data,report,web,mpi,mooncake"
    assert check.remedy == f"pip install 'sapwood[{missing}]' for the rest"


def test_every_extra_is_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = project["optional-dependencies"]
    named = {
        extra: tuple(re.split(r"[<>=]", one)[0] for one in packages)
        for extra, packages in offered.items()
        if extra not in ("docs", "bench", "dev")  # of those who work on Sapwood itself
    }
    assert named == software._EXTRAS


def test_other_systems_are_a_problem(monkeypatch):
    assert software.system(HERE).state == "ok"
    monkeypatch.setattr(software, "check_system", lambda: check_system("darwin"))
    check = software.system(HERE)
    assert check.state == "problem"
    assert check.remedy
    assert "Linux only, and this is darwin" in check.remedy
