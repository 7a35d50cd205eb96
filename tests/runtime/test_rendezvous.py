"""Ranks of the real launchers find each other, with and without a meeting point set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sapwood.errors import LaunchError
from sapwood.runtime import rendezvous
from sapwood.runtime.launch import Launch

MPIRUN = Path(sys.executable).with_name("mpirun")
BOUND = 90.0

# One rank: joins, adds, and tells who it is. With "run" it does so as a whole Run.
RANK = """
import sys
import torch
import sapwood
from sapwood.runtime.group import Group

torch.set_num_threads(1)
tag = float(sys.argv[1])
if "run" in sys.argv:
    model = torch.nn.Linear(2, 1)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=60) as run:
        run.model(torch.ones(1, 2)).sum().backward()
        run.step()
        launcher, rank, world = run.group.launch.launcher, run.rank, run.world
        total = float(world)
else:
    group = Group.join(torch.device("cpu"), timeout=60)
    value = torch.tensor([tag])
    group.all_reduce(value, "adding").wait()
    launcher, rank, world, total = group.launch.launcher, group.rank, group.world, value.item()
    group.leave(0)
    group.close()
sys.stdout.write(f"{launcher} {rank} {world} {total}\\n")
"""


@dataclass
class Job:
    process: subprocess.Popen[str]

    def lines(self) -> list[str]:
        try:
            out, err = self.process.communicate(timeout=BOUND)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"not done in time:\n{out}\n{err}") from None
        assert self.process.returncode == 0, f"{out}\n{err}"
        return sorted(out.splitlines())


def begin(*command: str, env: Mapping[str, str] | None = None) -> Job:
    full = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {})}
    # Ours is the code under test, also where another copy is installed.
    full["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])
    pipe = subprocess.PIPE
    return Job(subprocess.Popen(command, env=full, stdout=pipe, stderr=pipe, text=True))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "rank.py"
    path.write_text(textwrap.dedent(RANK))
    return str(path)


def temporary() -> list[str]:
    # torch leaves a cache of its own there.
    return sorted(entry.name for entry in Path(os.environ["TMPDIR"]).glob("sapwood*"))


def expected(launcher: str, world: int, tag: float) -> list[str]:
    return [f"{launcher} {rank} {world} {world * tag}" for rank in range(world)]


def test_two_mpiruns_at_once_meet_each_their_own(script: str) -> None:
    two = begin(str(MPIRUN), "-n", "2", sys.executable, script, "1")
    # Behind a shell each rank has a parent of its own.
    behind_shell = f'"{sys.executable}" "{script}" 10; exit $?'
    three = begin(str(MPIRUN), "-n", "3", "sh", "-c", behind_shell)
    assert two.lines() == expected("mpirun", 2, 1.0)
    assert three.lines() == expected("mpirun", 3, 10.0)
    assert temporary() == []


def test_mpirun_with_a_meeting_point_and_over_mpi(script: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    told = begin(str(MPIRUN), "-n", "2", sys.executable, script, "1", "run", env=place)
    # Told that they are on two hosts, ranks have only MPI to find each other.
    apart = ("env", "MPI_LOCALNRANKS=1", sys.executable, script, "10")
    asked = begin(str(MPIRUN), "-n", "2", *apart)
    assert told.lines() == expected("mpirun", 2, 1.0)
    assert asked.lines() == expected("mpirun", 2, 10.0)
    assert temporary() == []


def test_torchrun(script: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert begin(sys.executable, *torchrun, script, "1").lines() == expected("torchrun", 2, 1.0)
    assert temporary() == []


def launch(rank: int, **more: object) -> Launch:
    return Launch(launcher="mpirun", rank=rank, world=2, local_world=2, **more)  # type: ignore[arg-type]


def test_a_rank_without_a_rank_0_is_told_what_to_do() -> None:
    with pytest.raises(LaunchError, match=r"did not find rank 0 in 0\.1 s.*MASTER_ADDR"):
        rendezvous.meet(launch(1, job="alone"), 0.1)
    assert temporary() == []


def test_rank_0_without_the_others_is_told_and_leaves_no_file() -> None:
    with pytest.raises(LaunchError, match=r"not all 2 ranks came together in 0\.2 s"):
        rendezvous.meet(launch(0, job="alone"), 0.2)
    assert temporary() == []


def test_another_users_file_is_not_believed() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = Path(os.environ["TMPDIR"]) / f"sapwood-{os.getuid()}-x.port"
    path.write_text("1")
    os.chown(path, 12345, -1)
    with pytest.raises(LaunchError, match="did not find rank 0"):
        rendezvous.meet(launch(1, job="x"), 0.2)


def test_a_temporary_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match="set TMPDIR"):
        rendezvous.meet(launch(0, job="x"), 1.0)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot host .* 127\.0\.0\.1:{port}.*MASTER_PORT"):
            rendezvous.meet(launch(0, address="127.0.0.1", port=port), 1.0)


def test_several_hosts_without_mpi4py_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    apart = Launch(launcher="mpirun", rank=0, world=2, local_world=1)
    with pytest.raises(LaunchError, match=r"set MASTER_ADDR and\s+MASTER_PORT"):
        rendezvous.meet(apart, 1.0)
