"""Meeting the other ranks: one store per group, found by whichever way the launcher allows."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from sapwood.errors import LaunchError
from sapwood.runtime.launch import Launch
from sapwood.runtime.stores import Store, TCPStore

__all__ = ["meet"]

_POLL = 0.02


def meet(launch: Launch, timeout: float) -> Store:
    """Connect to the group's store; rank 0 hosts it unless the launcher already does."""
    if launch.address is not None and launch.port is not None:
        return _tcp(launch, launch.address, launch.port, timeout)
    if launch.one_host:
        return _by_file(launch, timeout)
    return _by_mpi(launch, timeout)


def _tcp(launch: Launch, host: str, port: int, timeout: float) -> Store:
    # torchrun's agent hosts the store itself and says so; then nobody else may.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        host,
        port,
        world_size=launch.world,
        is_master=launch.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _host_store(launch: Launch, address: str, timeout: float) -> TCPStore:
    return TCPStore(
        address,
        0,
        world_size=launch.world,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _by_file(launch: Launch, timeout: float) -> Store:
    """Ranks of one host find each other's port in a file that lives only as long as the meeting."""
    path = _meeting_file(launch)
    if launch.rank == 0:
        store = _host_store(launch, "127.0.0.1", timeout)
        draft = path.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.replace(path)
        try:
            _gather(store, launch, timeout)
        finally:
            path.unlink(missing_ok=True)
        return store
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {launch.rank} of {launch.world} did not find rank 0 in {timeout:g} s; "
                "were the ranks started by one mpirun? set MASTER_ADDR and MASTER_PORT otherwise"
            )
        time.sleep(_POLL)
    joined = _tcp(launch, "127.0.0.1", int(path.read_text()), timeout)
    _gather(joined, launch, timeout)
    return joined


def _gather(store: Store, launch: Launch, timeout: float) -> None:
    if store.add("sapwood/met", 1) == launch.world:
        store.set("sapwood/all-met", "1")
    store.wait(["sapwood/all-met"], timedelta(seconds=timeout))


def _meeting_file(launch: Launch) -> Path:
    # All ranks of one mpirun on a host have the same parent; its start time rules out a reused id.
    parent = os.getppid()
    born = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    job = "".join(c if c.isalnum() else "-" for c in launch.job) or f"{parent}-{born}"
    return Path(tempfile.gettempdir()) / f"sapwood-{os.getuid()}-{job}.port"


def _by_mpi(launch: Launch, timeout: float) -> Store:
    try:
        from mpi4py import MPI
    except ImportError:
        raise LaunchError(
            f"{launch.launcher} started {launch.world} ranks on several hosts and told none of "
            "them where to meet; set MASTER_ADDR and MASTER_PORT, or pip install 'sapwood[mpi]'"
        ) from None
    place = bytearray(256)
    store: Store | None = None
    if launch.rank == 0:
        hosted = _host_store(launch, socket.getfqdn(), timeout)
        text = f"{socket.getfqdn()}:{hosted.port}".encode()
        place[: len(text)] = text
        store = hosted
    MPI.COMM_WORLD.Bcast(place, root=0)
    host, _, port = bytes(place).rstrip(b"\0").decode().rpartition(":")
    return store or _tcp(launch, host, int(port), timeout)
