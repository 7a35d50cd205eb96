"""Meeting the other ranks: one store per process, found by whichever way the launcher allows."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from sapwood.errors import LaunchError
from sapwood.runtime.folder import process_start
from sapwood.runtime.launch import MPI_MARKS, Launch
from sapwood.runtime.mpimeeting import Exchange, agree_on_host
from sapwood.runtime.stores import PrefixStore, Store, TCPStore

__all__ = ["host_of", "meet"]

_POLL = 0.02

_met: dict[Launch, Store] = {}


def meet(launch: Launch, timeout: float) -> Store:
    """Connect to the group's store; rank 0 hosts it unless the launcher already does.

    A process meets the others once. Were the store hosted anew for a second group, a fast rank
    could still reach the old one.
    """
    if launch not in _met:
        _met[launch] = _meet(launch, timeout)
    store = _met[launch]
    store.set_timeout(timedelta(seconds=timeout))
    return store


def host_of(store: Store) -> str:
    """The host of a TCP store, also of one that torch or a launcher made; empty for another."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return inner.host if isinstance(inner, TCPStore) else ""


def _meet(launch: Launch, timeout: float) -> Store:
    if launch.address is not None and launch.port is not None:
        return _tcp(launch, launch.address, launch.port, timeout)
    if launch.one_host:
        return _by_file(launch, timeout)
    return _by_mpi(launch, timeout)


def _tcp(launch: Launch, host: str, port: int, timeout: float) -> TCPStore:
    # torchrun's agent hosts the store itself and says so; then nobody else may.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = launch.rank == 0 and not agent
    listener = _listener(host, port) if hosts else None
    try:
        return TCPStore(
            host,
            port if listener is None else listener.getsockname()[1],
            world_size=launch.world,
            is_master=hosts,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:
        what = "host the group's store" if hosts else "reach the group's store"
        raise LaunchError(
            f"rank {launch.rank} of {launch.world} cannot {what} at {host}:{port} "
            f"({_first_line(error)}); set MASTER_ADDR to a host all ranks can reach, and "
            "MASTER_PORT to a port that is free there, the same on every rank"
        ) from error


def _listener(host: str, port: int) -> socket.socket | None:
    """A listener on the address itself: torch's own is open on every interface, to everybody.

    Only for an address: a name may have another one here (127.0.1.1) than on other machines. None
    leaves it to torch, which can say best why it does not work.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        return socket.create_server((str(address), port), family=family, backlog=1024)
    except (ValueError, OSError):
        return None


def _by_file(launch: Launch, timeout: float) -> Store:
    """Ranks of one host find each other's port in a file that lives only as long as the meeting."""
    path = _meeting_file(launch)
    if launch.rank != 0:
        joined = _tcp(launch, "127.0.0.1", _read_port(launch, path, timeout), timeout)
        _gather(joined, launch, timeout)
        return joined
    hosted = _tcp(launch, "127.0.0.1", 0, timeout)
    try:
        _write_port(path, hosted.port)
        _gather(hosted, launch, timeout)
    finally:
        path.unlink(missing_ok=True)
    return hosted


def _write_port(path: Path, port: int) -> None:
    try:
        # The folder is everybody's: a name nobody can foresee, readable by this user only.
        handle, draft = tempfile.mkstemp(prefix=f"{path.stem}-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(str(port))
        Path(draft).replace(path)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot write {path} for the other ranks to find it ({error.strerror}); set "
            "TMPDIR to a place you may write to, or MASTER_ADDR and MASTER_PORT"
        ) from error


def _read_port(launch: Launch, path: Path, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        # Rank 0 takes the file away again when it gives up; another user's file is not meant.
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                return int(path.read_text())
        time.sleep(_POLL)
    raise LaunchError(
        f"rank {launch.rank} of {launch.world} did not find rank 0 in {timeout:g} s; were the "
        "ranks started by one mpirun? set MASTER_ADDR and MASTER_PORT otherwise"
    )


def _gather(store: Store, launch: Launch, timeout: float) -> None:
    try:
        if store.add("sapwood/met", 1) == launch.world:
            store.set("sapwood/all-met", "1")
        store.wait(["sapwood/all-met"], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LaunchError(
            f"not all {launch.world} ranks came together in {timeout:g} s ({_first_line(error)}); "
            "look for a rank that ended early or took another way, or raise timeout="
        ) from error


def _meeting_file(launch: Launch) -> Path:
    # The start time rules out a process id that was used before.
    starter = _starter()
    job = "".join(c if c.isalnum() else "-" for c in launch.job)
    name = job or f"{starter}-{process_start(starter)}"
    return Path(tempfile.gettempdir()) / f"sapwood-{os.getuid()}-{name}.port"


def _starter() -> int:
    """The process of mpirun on this host, also for a rank that a script of its own started."""
    marks = {f"{name}={os.environ[name]}".encode() for name in MPI_MARKS if name in os.environ}
    pid = os.getppid()
    while pid > 1 and marks and marks <= _environment(pid):
        pid = _parent(pid)
    return pid


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _by_mpi(launch: Launch, timeout: float) -> Store:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{launch.launcher} started {launch.world} ranks on several hosts and told none of "
            f"them where to meet, and mpi4py cannot be used ({error}); set MASTER_ADDR and "
            "MASTER_PORT, or pip install 'sapwood[mpi]'"
        ) from None
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.world):
        raise LaunchError(
            f"{launch.launcher} says this is rank {launch.rank} of {launch.world}, mpi4py says "
            f"{world.Get_rank()} of {world.Get_size()}: it uses another MPI than {launch.launcher};"
            " build mpi4py for this MPI, or set MASTER_ADDR and MASTER_PORT"
        )
    exchange = Exchange(world, launch, timeout)
    host = agree_on_host(exchange, launch.rank)
    store = _tcp(launch, host, 0, timeout) if launch.rank == 0 else None
    port = int(exchange.share(0 if store is None else store.port))
    return store or _tcp(launch, host, port, timeout)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
