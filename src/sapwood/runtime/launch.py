"""Who am I: which launcher started this process, and where the group meets.

    launcher   rank                   size                   meeting point
    torchrun   RANK                   WORLD_SIZE             MASTER_ADDR, MASTER_PORT
    srun       SLURM_PROCID           SLURM_NTASKS           first host of the step, own port
    mpirun     OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   MASTER_ADDR, MASTER_PORT if set, else
               PMI_RANK               PMI_SIZE               a file on the host, else mpi4py

Only the environment is read here; nothing is connected and torch is not imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sapwood.errors import LaunchError

__all__ = ["Launch", "detect", "first_host"]

Launcher = Literal["none", "torchrun", "srun", "mpirun"]

# (rank, world, local rank, local world) as each MPI family names them.
_MPI_FAMILIES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
_PORT_BASE, _PORT_SPAN = 20000, 20000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place in its group."""

    launcher: Launcher
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str | None = None
    """Host of the meeting point; None when it must be found out (mpirun)."""
    port: int | None = None
    job: str = ""
    """Tells this start of the job from any other on the same host."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on this host."""
        return self.local_world == self.world


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables; a plain ``python train.py`` is one rank of launcher "none"."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if int(env.get("SLURM_NTASKS", "1") or 1) > 1 and "SLURM_PROCID" in env and _in_step(env):
        return _srun(env)
    for family in _MPI_FAMILIES:
        if family[0] in env and family[1] in env:
            return _mpirun(env, family)
    return Launch(launcher="none")


def _torchrun(env: Mapping[str, str]) -> Launch:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if world > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={world} are set but MASTER_ADDR or MASTER_PORT is not; "
            "start with torchrun or `sapwood run`, or set both"
        )
    return _checked(
        Launch(
            launcher="torchrun",
            rank=rank,
            world=world,
            local_rank=_number(env, "LOCAL_RANK", rank),
            local_world=_number(env, "LOCAL_WORLD_SIZE", world),
            address=env.get("MASTER_ADDR"),
            port=_number(env, "MASTER_PORT", 0) or None,
            job=env.get("TORCHELASTIC_RUN_ID", "") + env.get("TORCHELASTIC_RESTART_COUNT", ""),
        )
    )


def _in_step(env: Mapping[str, str]) -> bool:
    # Inside sbatch but outside srun SLURM_NTASKS is set too, with no step: that is one process.
    return "SLURM_STEP_ID" in env or "SLURM_STEPID" in env


def _srun(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    job = env.get("SLURM_JOB_ID", "0") + "." + env.get("SLURM_STEP_ID", "0")
    reserved = re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", ""))
    derived = _PORT_BASE + sum(int(n) * 31**i for i, n in enumerate(re.findall(r"\d+", job))) % (
        _PORT_SPAN
    )
    return _checked(
        Launch(
            launcher="srun",
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            local_world=_tasks_here(env),
            address=env.get("MASTER_ADDR") or first_host(nodes),
            port=_number(env, "MASTER_PORT", int(reserved.group()) if reserved else derived),
            job=job,
        )
    )


def _tasks_here(env: Mapping[str, str]) -> int:
    """This node's count in SLURM's list, which looks like ``4(x3),2``."""
    counts: list[int] = []
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else int(env["SLURM_NTASKS"])


def _mpirun(env: Mapping[str, str], names: tuple[str, str, str, str]) -> Launch:
    rank, world, local_rank, local_world = names
    size = _number(env, world)
    return _checked(
        Launch(
            launcher="mpirun",
            rank=_number(env, rank),
            world=size,
            local_rank=_number(env, local_rank, 0),
            local_world=_number(env, local_world, size),
            address=env.get("MASTER_ADDR"),
            port=_number(env, "MASTER_PORT", 0) or None,
            job=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "",
        )
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[07-09,12],login1`` gives ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError(f"cannot read the node list {nodes!r}; set MASTER_ADDR and MASTER_PORT")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"the launcher's {name} is {text!r}, expected a number; start with torchrun, srun, "
            "mpirun or `sapwood run`"
        ) from None


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.world:
        raise LaunchError(
            f"{launch.launcher} says this is rank {launch.rank} of {launch.world}; a rank lies "
            "between 0 and the size less one: is a variable left over from another launcher set?"
        )
    return launch
