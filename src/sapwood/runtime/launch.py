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
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sapwood.errors import LaunchError

__all__ = ["MPI_MARKS", "Launch", "check_system", "detect", "first_host"]

Launcher = Literal["none", "torchrun", "srun", "mpirun"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What one family of MPI launchers calls things; of several names the first that is set."""

    rank: str
    world: str
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]


_OPEN_MPI = _Family(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# Cray's launchers set PMI_RANK too, and then only their own names for the place on the host.
_PMI = _Family(
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)
_PALS = _Family("PALS_RANKID", "PALS_SIZE", ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",))
_MPI_FAMILIES = (_OPEN_MPI, _PMI, _PALS)
MPI_MARKS = (*(f.rank for f in _MPI_FAMILIES), *(f.world for f in _MPI_FAMILIES), "PMI_FD")
"""What mpirun sets in its ranks, and so in whatever a rank starts, but not in itself."""
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
# Below the ports Linux gives to outgoing connections, which could be taken by chance.
_PORT_BASE, _PORT_SPAN = 20000, 12000
_NODE_COUNTS = re.compile(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*")


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
    """Read the launcher's variables; a plain ``python train.py`` is one rank of launcher "none".

    Raises:
        LaunchError: what a launcher says makes no sense, or this system cannot run ranks.
    """
    check_system()
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    family = _mpi_family(env)
    if _in_step(env) and (family is None or _same_place(env, family)):
        return _srun(env)
    if family is not None:
        return _mpirun(env, family)
    return Launch(launcher="none")


def check_system(system: str = sys.platform) -> None:
    """Refuse systems on which something would break in the middle of a training.

    Raises:
        LaunchError: this is not Linux.
    """
    if system != "linux":
        raise LaunchError(
            f"Sapwood trains on Linux only, and this is {system}: it needs memfd, abstract sockets "
            "and /proc; use Linux, a container or a virtual machine (WSL 2 on Windows)"
        )


def _mpi_family(env: Mapping[str, str]) -> _Family | None:
    return next((one for one in _MPI_FAMILIES if one.rank in env and one.world in env), None)


def _same_place(env: Mapping[str, str], family: _Family) -> bool:
    # Under SLURM mpirun starts a helper per node with srun, and ranks inherit the helper's place.
    # srun itself can set PMI_RANK as well, and then both say the same.
    srun = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    return srun == (_number(env, family.rank), _number(env, family.world))


def _torchrun(env: Mapping[str, str]) -> Launch:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if world > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
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
            port=_port(env, None),
            job=env.get("TORCHELASTIC_RUN_ID", "") + env.get("TORCHELASTIC_RESTART_COUNT", ""),
        )
    )


def _in_step(env: Mapping[str, str]) -> bool:
    # Inside sbatch but outside srun SLURM_NTASKS is set too, with no step: that is one process.
    step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    return step and "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1) > 1


def _srun(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0"
    job = f"{env.get('SLURM_JOB_ID', '0')}.{step}"
    return _checked(
        Launch(
            launcher="srun",
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            local_world=_tasks_here(env),
            address=env.get("MASTER_ADDR") or first_host(nodes),
            port=_port(env, _step_port(env, job)),
            job=job,
        )
    )


def _step_port(env: Mapping[str, str], job: str) -> int:
    """The port SLURM reserved for the step, else one that all its ranks derive alike."""
    reserved = re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved:
        return int(reserved.group())
    # Steps that share a host have near ids, so neighbours must fall on different ports.
    number = 0
    for part in reversed(re.findall(r"\d+", job)):
        number = number * 997 + int(part)
    return _PORT_BASE + number % _PORT_SPAN


def _tasks_here(env: Mapping[str, str]) -> int:
    """This node's count in SLURM's list, which looks like ``4(x3),2``."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    if text and not _NODE_COUNTS.fullmatch(text):
        raise LaunchError(
            f"SLURM_TASKS_PER_NODE is {text!r}, expected counts like '4(x3),2'; start with srun, "
            "or unset it and all other SLURM variables"
        )
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else _number(env, "SLURM_NTASKS")


def _mpirun(env: Mapping[str, str], family: _Family) -> Launch:
    size = _number(env, family.world)
    return _checked(
        Launch(
            launcher="mpirun",
            rank=_number(env, family.rank),
            world=size,
            local_rank=_number(env, _first_set(env, family.local_rank), 0),
            local_world=_number(env, _first_set(env, family.local_world), size),
            address=env.get("MASTER_ADDR"),
            port=_port(env, None),
            job=next((env[name] for name in _MPI_JOBS if env.get(name)), ""),
        )
    )


def _first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if env.get(name)), names[0])


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[07-09,12],login1`` gives ``gpu07``."""
    first = re.match(r"(?:[^,\[\]]|\[[\d,-]+\])+", nodes)
    if first is None or not re.fullmatch(r"(?:[^\[\]]|\[\d[\d,-]*\])+", nodes):
        raise LaunchError(
            f"cannot read the node list {nodes!r}, expected one like 'gpu[07-09,12],login1'; "
            "set MASTER_ADDR and MASTER_PORT"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _port(env: Mapping[str, str], default: int | None) -> int | None:
    if not env.get("MASTER_PORT"):
        return default
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise LaunchError(
            f"MASTER_PORT is {port}, expected a port between 1 and 65535; set it to a free one, "
            "or unset it where the launcher can choose"
        )
    return port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"the launcher's {name} is {text!r}, expected a number; start with torchrun, srun, "
            "mpirun or `sapwood run`, or unset it"
        ) from None


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.world:
        raise LaunchError(
            f"{launch.launcher} says this is rank {launch.rank} of {launch.world}; a rank lies "
            "between 0 and the size less one: is a variable left over from another launcher set?"
        )
    return launch
