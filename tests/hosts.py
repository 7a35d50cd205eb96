"""A rank that is on a host of its own: with a name, and an /etc/hosts, that only it sees."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import tempfile
from collections.abc import Mapping

NEW_MOUNTS, NEW_NAME = 0x00020000, 0x04000000
PRIVATE, BIND = (1 << 18) | (1 << 14), 1 << 12
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI")


def become_host(name: str, table: Mapping[str, str]) -> None:
    """Give this process a host name and a table of names; both end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(NEW_MOUNTS | NEW_NAME))
    _check(libc.mount(b"none", b"/", None, PRIVATE, None))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in table.items()))
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        _check(libc.mount(file.name.encode(), b"/etc/hosts", None, BIND, None))
    socket.sethostname(name)
    platform._uname_cache = None  # type: ignore[attr-defined]  # the fork server knew another


def forget_launcher() -> None:
    """Take away what the launcher of the tests said."""
    for key in [one for one in os.environ if one.startswith(LAUNCHERS)]:
        del os.environ[key]


def become_task(sizes: list[int], addresses: list[str]) -> int:
    """Turn a rank of ``ranks.spawn(machines=sizes)`` into a task of srun; its node.

    As on Debian, each node's own name is 127.0.1.1 to itself.
    """
    rank, node, local = (int(os.environ[n]) for n in ("RANK", "GROUP_RANK", "LOCAL_RANK"))
    names = [f"node{number}" for number in range(len(sizes))]
    table = dict(zip(names, addresses, strict=True)) | {names[node]: "127.0.1.1"}
    become_host(names[node], table)
    forget_launcher()
    os.environ.update(
        SLURM_JOB_ID="7",
        SLURM_STEP_ID="0",
        SLURM_PROCID=str(rank),
        SLURM_NTASKS=str(sum(sizes)),
        SLURM_NODEID=str(node),
        SLURM_LOCALID=str(local),
        SLURM_STEP_NODELIST=",".join(names),
        SLURM_STEP_TASKS_PER_NODE=",".join(map(str, sizes)),
    )
    return node


def _check(code: int) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
