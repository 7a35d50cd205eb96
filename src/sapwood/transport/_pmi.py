"""A process manager for one MPI process, so that ones started without mpiexec can connect.

MPICH takes all processes that no manager has named for one and the same, and refuses to connect
them. While MPI starts, a small child answers what it asks of a manager, and gives it a name of its
own. It must be a process: MPI starts with Python's lock held. It ends when MPI has started.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["managed"]

_VARIABLES = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
_SERVER = """
import socket, sys
name, kept = sys.argv[1], {"PMI_process_mapping": "(vector,(0,1,1))"}
answers = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=" + name,
    "get_universe_size": "cmd=universe_size rc=0 size=1",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out rc=0",
    "finalize": "cmd=finalize_ack rc=0",
}
stream = socket.socket(fileno=0).makefile("rwb")
for line in stream:
    said = dict(one.split("=", 1) for one in line.decode().split() if "=" in one)
    answer = answers.get(said["cmd"], "cmd=" + said["cmd"] + "_result rc=-1")
    if said["cmd"] == "put":
        kept[said["key"]] = said["value"]
    if said["cmd"] == "get":
        found = kept.get(said["key"])
        answer = "cmd=get_result rc=-1 msg=unknown_key value=unknown"
        if found is not None:
            answer = "cmd=get_result rc=0 msg=success value=" + found
    stream.write(answer.encode() + b"\\n")
    stream.flush()
"""


@contextmanager
def managed() -> Iterator[None]:
    """Have a manager while the block runs, unless mpiexec or the like is one already."""
    if any(name.startswith(("PMI_", "PMIX_")) for name in os.environ):
        yield
        return
    ours, theirs = socket.socketpair()
    name = f"sapwood_{secrets.token_hex(8)}"
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SERVER, name], stdin=theirs.fileno(), stdout=2
            )
        os.environ.update(zip(_VARIABLES, (str(ours.fileno()), "0", "1"), strict=True))
        try:
            yield
        finally:
            for variable in _VARIABLES:
                del os.environ[variable]
            child.kill()
            child.wait()
