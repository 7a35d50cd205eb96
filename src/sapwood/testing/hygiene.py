"""What a test may not leave behind, and how to find out.

    before = hygiene.Snapshot.take(watched)
    ...                                        # the test
    problems = hygiene.leftovers(before, grace=5.0)

Each check compares the world after a test with the snapshot from before it. What needs a moment to
end by itself (a process, a thread, a socket) is given ``grace`` seconds in all.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.runtime import faults
from sapwood.testing import _proc
from sapwood.testing._proc import adopt_orphans

__all__ = ["Snapshot", "adopt_orphans", "leftovers", "torch_state"]

_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to
_CACHES = frozenset(
    {".cache", ".git", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache"}
    | {".ruff_cache", ".venv", "__pycache__"}
)
# Helpers of multiprocessing that live as long as the process that uses it.
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
# fmt: off
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SAPWOOD_", "TORCHELASTIC_",
    "SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL",
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The parts of the world a test may change only for its own duration."""

    watched: tuple[Path, ...]
    processes: frozenset[int]
    sockets: frozenset[str]
    shared_memory: frozenset[str]
    files: frozenset[Path]
    threads: frozenset[int]
    environment: dict[str, str]
    torch: dict[str, Any]

    @classmethod
    def take(cls, watched: Iterable[Path] = ()) -> Snapshot:
        """Look around now. ``watched`` are folders in which no new entry may appear."""
        folders = tuple(watched)
        return cls(
            watched=folders,
            processes=frozenset(one.pid for one in _strays()),
            sockets=frozenset(_listening()),
            shared_memory=frozenset(_shared_memory()),
            files=frozenset(_files(folders)),
            threads=frozenset(id(one) for one in threading.enumerate()),
            environment=_launcher_environment(),
            torch=torch_state(),
        )


def leftovers(before: Snapshot, grace: float = 5.0) -> list[str]:
    """What was not there ``before``, one sentence each; waits up to ``grace`` seconds."""
    deadline = time.monotonic() + grace
    while True:
        problems = [text for check in _TRANSIENT for text in check(before)]
        if not problems or time.monotonic() > deadline:
            return problems + [text for check in _LASTING for text in check(before)]
        gc.collect()
        time.sleep(0.02)


def torch_state() -> dict[str, Any]:
    """Torch's global settings; empty as long as nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "default device": torch.get_default_device(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def check_processes(before: Snapshot) -> list[str]:
    """No process the test started, at any depth, may still run."""
    new = [one for one in _strays() if one.pid not in before.processes]
    return [f"process {one.pid} still runs: {one.command or '(no command)'}" for one in new]


def check_sockets(before: Snapshot) -> list[str]:
    """No TCP port or Unix socket of this process may still listen."""
    return [f"{name} is still listening" for name in sorted(_listening() - before.sockets)]


def check_threads(before: Snapshot) -> list[str]:
    """No thread that would keep the interpreter from ending, or that is ours, may still run."""
    new = [one for one in threading.enumerate() if id(one) not in before.threads]
    left = [one for one in new if not one.daemon or one.name.startswith("sapwood-")]
    return [f"thread {one.name!r} still runs" for one in left if one.is_alive()]


def check_shared_memory(before: Snapshot) -> list[str]:
    """Nothing named may be left in shared memory."""
    new = sorted(_shared_memory() - before.shared_memory)
    return [f"{_SHM / name} is left in shared memory" for name in new if not _held_elsewhere(name)]


def check_files(before: Snapshot) -> list[str]:
    """No file may appear outside the test's own folder."""
    return [f"{path} was left behind" for path in sorted(_files(before.watched) - before.files)]


def check_faults(before: Snapshot) -> list[str]:
    """No fault point may stay armed."""
    return [f"fault point {name!r} is still armed" for name in faults.armed()]


def check_environment(before: Snapshot) -> list[str]:
    """The variables that tell a process who it is must be as they were."""
    now = _launcher_environment()
    names = sorted(now.keys() | before.environment.keys())
    return [
        f"{name} was {before.environment.get(name)!r} and is {now.get(name)!r}"
        for name in names
        if now.get(name) != before.environment.get(name)
    ]


def check_torch(before: Snapshot) -> list[str]:
    """Torch's global settings must be as they were."""
    now = torch_state()
    return [
        f"torch's {name} was {value!r} and is {now[name]!r}"
        for name, value in before.torch.items()
        if now[name] != value
    ]


def restore(before: Snapshot) -> None:
    """Undo what one test left behind, so that it fails alone."""
    _proc.kill(one.pid for one in _strays() if one.pid not in before.processes)
    faults.disarm_all()
    for name in _launcher_environment().keys() - before.environment.keys():
        del os.environ[name]
    os.environ.update(before.environment)
    _restore_torch(before.torch)


Check = Callable[[Snapshot], list[str]]
# Only what may end by itself is worth waiting for.
_TRANSIENT: Sequence[Check] = (check_processes, check_sockets, check_threads, check_shared_memory)
_LASTING: Sequence[Check] = (check_files, check_faults, check_environment, check_torch)


def _strays() -> list[_proc.Process]:
    me = os.getpid()
    found = []
    for one in _proc.descendants(me):
        if one.state == "Z":
            # An adopted orphan has nobody but us to ask for its end.
            if one.parent == me:
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
        elif not (one.parent == me and any(name in one.command for name in _HELPERS)):
            found.append(one)
    return found


def _listening() -> set[str]:
    # Our own sockets are asked, rather than the kernel's tables read: those hold the connections of
    # the whole machine, the closed ones for another minute.
    found = set()
    for number in _sockets():
        with suppress(OSError):
            one = socket.socket(fileno=number)
            try:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(_told(one))
            finally:
                one.detach()  # it has an owner, who closes it
    return found


def _sockets() -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                found.append(int(entry.name))
    return found


def _told(one: socket.socket) -> str:
    address = one.getsockname()
    if one.family == socket.AF_UNIX:
        name = os.fsdecode(address).replace("\0", "@")  # a name that is no path begins with a zero
        return f"Unix socket {name or one.fileno()}"
    return f"TCP port {address[1]}"


def _shared_memory() -> set[str]:
    return {entry.name for entry in _SHM.iterdir()} if _SHM.is_dir() else set()


def _held_elsewhere(name: str) -> bool:
    """Whether a process that is not ours uses this entry, so that it is not ours either."""
    ours = {os.getpid(), *(one.pid for one in _proc.descendants(os.getpid()))}
    path = str(_SHM / name)
    for one in _proc.processes():
        with suppress(OSError):
            if one.pid not in ours and path in Path(f"/proc/{one.pid}/maps").read_text(
                errors="replace"
            ):
                return True
    return False


def _files(folders: Sequence[Path]) -> set[Path]:
    return {
        entry
        for folder in folders
        if folder.is_dir()
        for entry in folder.iterdir()
        if entry.name not in _CACHES and not entry.name.endswith(".egg-info")
    }


def _launcher_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_LAUNCHER_VARIABLES)}


def _restore_torch(state: dict[str, Any]) -> None:
    if not state:
        return
    torch = sys.modules["torch"]
    torch.set_default_dtype(state["default dtype"])
    torch.set_num_threads(state["number of threads"])
    torch.set_grad_enabled(state["grad mode"])
    now = torch_state()
    strict, warn_only = "deterministic algorithms", "deterministic warn only"
    # Only when it differs: this call imports the compiler, which takes seconds.
    if (now[strict], now[warn_only]) != (state[strict], state[warn_only]):
        torch.use_deterministic_algorithms(state[strict], warn_only=state[warn_only])
    if torch.get_default_device() != state["default device"]:
        torch.set_default_device(state["default device"])
    if torch.distributed.is_initialized() and not state["process group"]:
        torch.distributed.destroy_process_group()
