"""Who am I, read from environments as the launchers really set them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sapwood.errors import LaunchError
from sapwood.runtime.launch import Launch, check_system, detect, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# As SLURM 22.05 sets them; what sbatch gives its script, and what srun adds for each task.
SBATCH = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}
SRUN = SBATCH | {
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
SRUN_ON_FOUR = SRUN | {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "14",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_NODELIST": "gpu[05-12]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-4711@1",
}
PALS = {
    "PALS_RANKID": "5",
    "PALS_SIZE": "8",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_APID": "a1-b2",
}


def place(launch: Launch) -> tuple[str, int, int, int, int]:
    one = launch
    return one.launcher, one.rank, one.world, one.local_rank, one.local_world


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1)),
        (SBATCH, ("none", 0, 1, 0, 1)),
        (SRUN, ("srun", 1, 2, 1, 2)),
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "3.0"}, ("srun", 1, 2, 1, 2)),
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1)),
        (SRUN_ON_FOUR, ("srun", 13, 14, 1, 2)),
        (SRUN_ON_FOUR | {"SLURM_NODEID": "2", "SLURM_PROCID": "9"}, ("srun", 9, 14, 1, 4)),
        (OPEN_MPI, ("mpirun", 5, 8, 1, 4)),
        (HYDRA, ("mpirun", 1, 3, 1, 3)),
        (PALS, ("mpirun", 5, 8, 1, 4)),
        (PALS | {"PMI_RANK": "5", "PMI_SIZE": "8"}, ("mpirun", 5, 8, 1, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1"}, ("mpirun", 5, 8, 1, 8)),
    ],
)
def test_each_launcher_tells_the_place(
    env: Mapping[str, str], expected: tuple[str, int, int, int, int]
) -> None:
    assert place(detect(env)) == expected


def test_what_started_the_process_last_is_believed() -> None:
    # mpirun inside a SLURM job on two nodes: its helper on each is a task of srun.
    helper = SRUN | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    assert place(detect(helper | OPEN_MPI)) == ("mpirun", 5, 8, 1, 4)
    assert place(detect(helper | HYDRA)) == ("mpirun", 1, 3, 1, 3)
    # torchrun or `sapwood run` inside any of them.
    assert detect(helper | HYDRA | TORCHRUN).launcher == "torchrun"


def test_torchrun_and_sapwood_run_name_the_meeting_point_and_the_attempt() -> None:
    launch = detect(TORCHRUN)
    assert (launch.address, launch.port) == ("node0", 29500)
    assert launch.job != detect(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).job
    by_sapwood = TORCHRUN | {"TORCHELASTIC_RUN_ID": "0123456789ab", "MASTER_ADDR": "localhost"}
    assert detect(by_sapwood).job != launch.job
    assert not launch.one_host


def test_srun_meets_on_the_first_host_of_the_step() -> None:
    launch = detect(SRUN_ON_FOUR)
    assert launch.address == "gpu07"
    assert launch.job == "4711.0"
    assert launch.port is not None
    assert 20000 <= launch.port < 32768
    assert detect(SRUN_ON_FOUR | {"SLURM_STEP_RESV_PORTS": "12003-12004"}).port == 12003
    asked = detect(SRUN_ON_FOUR | {"MASTER_ADDR": "boss", "MASTER_PORT": "1234"})
    assert (asked.address, asked.port) == ("boss", 1234)


def test_steps_near_each_other_derive_different_ports() -> None:
    ports = {
        detect(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(5000, 5100)
        for step in range(4)
    }
    assert len(ports) == 400


def test_mpirun_has_a_meeting_point_only_if_it_is_set() -> None:
    assert (detect(HYDRA).address, detect(HYDRA).port) == (None, None)
    told = detect(HYDRA | {"MASTER_ADDR": "h", "MASTER_PORT": "7"})
    assert (told.address, told.port) == ("h", 7)
    assert detect(OPEN_MPI).job == "prterun-vm-4711@1"
    assert detect(PALS).job == "a1-b2"
    assert detect(HYDRA).one_host
    assert not detect(OPEN_MPI).one_host


@pytest.mark.parametrize(
    ("env", "named", "remedy"),
    [
        (TORCHRUN | {"RANK": "three"}, "RANK is 'three'", "start with torchrun"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is ''", "start with torchrun"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4", "left over"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 4", "left over"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999", "between 1 and 65535"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0", "between 1 and 65535"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'", "start with"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT", "set both"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR or MASTER_PORT", "set both"),
        (SRUN | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many'", "unset"),
        (SRUN | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'", "unset"),
        (SRUN | {"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'", "unset"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(y3)"}, "4(y3)", "start with srun"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[07-"}, "gpu[07-", "set MASTER_ADDR"),
        (SRUN | {"SLURM_STEP_NODELIST": ","}, "','", "set MASTER_ADDR"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "0"}, "rank 5 of 0", "left over"),
        (HYDRA | {"MPI_LOCALNRANKS": "all"}, "MPI_LOCALNRANKS is 'all'", "start with"),
    ],
)
def test_bad_values_are_named_with_a_remedy(
    env: Mapping[str, str], named: str, remedy: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(named)) as caught:
        detect(env)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,b2", "a1"),
        ("n[1-4]", "n1"),
        ("vm", "vm"),
        ("rack[2-3]-node[010-012]-ib,x", "rack2-node010-ib"),
        ("n[4]", "n4"),
    ],
)
def test_first_host_of_node_lists(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


WORD = st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True)
PLAIN = WORD.map(lambda name: (name, name))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, str]:
    """A range in brackets, and the first number it stands for, with its leading zeros."""
    width = draw(st.integers(1, 4))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, 10**width - 1))
        high = draw(st.none() | st.integers(low, 10**width - 1))
        text = f"{low:0{width}d}"
        parts.append(text if high is None else f"{text}-{high:0{width}d}")
    return f"[{','.join(parts)}]", parts[0].partition("-")[0]


@st.composite
def ranged(draw: st.DrawFn) -> tuple[str, str]:
    text = first = draw(WORD)
    for _ in range(draw(st.integers(1, 2))):
        brackets, number = draw(ranges())
        suffix = draw(st.just("") | WORD)
        text, first = text + brackets + suffix, first + number + suffix
    return text, first


@given(st.lists(PLAIN | ranged(), min_size=1, max_size=4))
def test_first_host_is_the_first_of_the_expansion(entries: list[tuple[str, str]]) -> None:
    assert first_host(",".join(text for text, _ in entries)) == entries[0][1]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused(system: str) -> None:
    with pytest.raises(LaunchError, match=f"Linux only, and this is {system}"):
        check_system(system)
