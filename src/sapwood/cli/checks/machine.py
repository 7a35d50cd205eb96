"""Cores, memory, shared memory, network, launcher, and the folder for runs."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

from sapwood.cli.checks.base import Check, note, ok, problem
from sapwood.errors import LaunchError

__all__ = ["MACHINE"]

_LITTLE_ROOM = 256 << 20
"""Bytes free where runs go: less is soon used up by traces, and by checkpoints beside them."""
_GIB = 2**30
_SMALL_SHM = 256 * 2**20
_SMALL_MEMORY = 2 * _GIB
# By these ranks know which others may be on their machine.
_MACHINE_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")


def cores(folder: Path) -> Check:
    """Cores of the machine, and those this process may use."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} usable of {total}"
    if usable < total:
        return note("cores", found, "affinity or a container keeps the others from this process")
    return ok("cores", found)


def memory(folder: Path) -> Check:
    """Memory that is free, within the limit of the container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, total = values["MemAvailable"], values["MemTotal"]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
        free = min(free, total)
    found = f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if free < _SMALL_MEMORY:
        return note("memory", found, "close something, or train a small model")
    return ok("memory", found)


def shared_memory(folder: Path) -> Check:
    """The size of /dev/shm, which data loaders and staging buffers use."""
    try:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 (this is the thing being examined)
    except OSError:
        return problem("shared memory", "no /dev/shm", "mount a tmpfs at /dev/shm")
    found = f"{usage.free / _GIB:.2f} GiB free of {usage.total / _GIB:.2f} in /dev/shm"
    if usage.free < _SMALL_SHM:
        return note("shared memory", found, "start the container with --shm-size=2g, or free some")
    return ok("shared memory", found)


def staging(folder: Path) -> Check:
    """Whether memory for staging checkpoints can be made: there is no other way for these."""
    from sapwood.buffers import Arena

    try:
        Arena(4096, label="doctor").close()
    except (OSError, AttributeError) as error:
        remedy = "let the container's seccomp profile allow memfd_create, or use another Python"
        return problem("staging memory", f"checkpoints cannot be staged: {error!r}", remedy)
    return ok("staging memory", "a memfd can be made")


def memory_between_ranks(folder: Path) -> Check:
    """Whether ranks of this machine can average through its memory, tried out for real."""
    name = "averaging in memory"
    try:
        _share_memory()
    except (OSError, EOFError, ValueError, AttributeError) as error:
        remedy = (
            "averaging goes over the loopback interface instead; to have it in memory, let the "
            "container's seccomp profile allow memfd_create and abstract Unix sockets"
        )
        return note(name, f"ranks of this machine cannot share memory: {error!r}", remedy)
    unreadable = [place for place in _MACHINE_FILES if not _exists(place)]
    if unreadable:
        remedy = "mount /proc; until then every rank counts as alone on its machine"
        return note(name, f"{unreadable[0]} cannot be read", remedy)
    return ok(name, "works: a memfd was passed over an abstract socket and read back")


def _exists(place: str) -> bool:
    try:
        Path(place).stat()
    except OSError:
        return False
    return True


def _share_memory() -> None:
    """Hand a piece of memory to ourselves, the way ranks hand theirs to each other."""
    from sapwood.buffers import Arena
    from sapwood.sync.averaging.messages import Kind, Message, receive, send

    mark = secrets.token_bytes(16)
    kind = socket.SOCK_SEQPACKET
    with (
        socket.socket(socket.AF_UNIX, kind) as listener,
        socket.socket(socket.AF_UNIX, kind) as sender,
    ):
        listener.bind(f"\0sapwood-doctor-{secrets.token_hex(8)}")
        listener.listen(1)
        listener.settimeout(5.0)
        sender.settimeout(5.0)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            given = Arena(4096, label="doctor")
            try:
                send(sender, Message(Kind.CONTRIBUTION, descriptor=given.fd))
                taken = Arena.attach(receive(receiver).descriptor)
                given.bytes[: len(mark)] = list(mark)
                seen = taken.bytes[: len(mark)].tobytes()
                taken.close()
            finally:
                given.close()
    if seen != mark:
        raise ValueError("what one end wrote did not arrive at the other")


def loopback(folder: Path) -> Check:
    """Whether ranks on this machine can reach each other."""
    interfaces = [name for _, name in socket.if_nameindex()]
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "bring the loopback interface up: ip link set lo up"
        return problem("network", f"127.0.0.1 does not answer: {error}", remedy)
    return ok("network", f"loopback answers; interfaces: {', '.join(interfaces)}")


def gloo_interface(folder: Path) -> Check:
    """The interface gloo will choose: the one named, or the one of the host's own name."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    known = {name for _, name in socket.if_nameindex()}
    if chosen:
        unknown = sorted(set(chosen.split(",")) - known)
        if unknown:
            remedy = f"set it to one of {', '.join(sorted(known))}, or unset it"
            return problem("gloo interface", f"GLOO_SOCKET_IFNAME names {unknown[0]}", remedy)
        return ok("gloo interface", f"{chosen} (GLOO_SOCKET_IFNAME)")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = "set GLOO_SOCKET_IFNAME (lo for one machine), or add the name to /etc/hosts"
        return note("gloo interface", f"the host name {name} has no address", remedy)
    return ok("gloo interface", f"by host name: {name} is {address}")


def launcher(folder: Path) -> Check:
    """Which launcher, if any, started this process."""
    from sapwood.runtime.launch import detect

    try:
        place = detect()
    except LaunchError as error:
        return problem("launcher", str(error), "unset what is left over from another launcher")
    if place.launcher == "none":
        found = [name for name in ("srun", "mpirun") if shutil.which(name)]
        also = f"; on the path: {', '.join(found)}" if found else ""
        return ok("launcher", f"none: `sapwood run -n N` starts ranks here{also}")
    return ok("launcher", f"{place.launcher}: rank {place.rank} of {place.world}")


def runs_folder(folder: Path) -> Check:
    """Whether runs can be written where they would go."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        remedy = f"give Run(folder=...) a folder you may write to, or change who owns {place}"
        return problem("runs folder", f"cannot write in {place}: {error.strerror}", remedy)
    found = f"{folder} can be written; {free / _GIB:.1f} GiB free"
    if free < _LITTLE_ROOM:
        remedy = f"make room on the disk of {place}, or give Run(folder=...) a folder elsewhere"
        return (
            problem("runs folder", found, remedy)
            if not free
            else note("runs folder", found, remedy)
        )
    return ok("runs folder", found)


MACHINE = (
    cores,
    memory,
    shared_memory,
    staging,
    memory_between_ranks,
    loopback,
    gloo_interface,
    launcher,
    runs_folder,
)
