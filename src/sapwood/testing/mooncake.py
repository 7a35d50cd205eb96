"""A real Mooncake cluster for tests: a master, and a client that gives it memory, on loopback.

    with mooncake.serve(folder) as cluster:
        keeper = open_keeper(f"{cluster.url}/prefix")

It needs the package ``mooncake-transfer-engine-non-cuda`` and the libraries it is linked to;
``missing`` says what is not there.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from sapwood.errors import ConfigError, DeadlineError, Unreachable
from sapwood.storage.mooncake.place import MooncakePlace
from sapwood.testing import _proc

__all__ = ["Cluster", "missing", "serve"]

HOST = "127.0.0.1"
_PORTS = range(12000, 32000)
_DICE = random.SystemRandom()
_TRIES = 3
_START_TIMEOUT = 20.0
_STOP_TIMEOUT = 10.0
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 2**22, "tcp", "", sys.argv[1])
print("ready" if not code else f"code {code}", flush=True)
sys.stdin.read()
"""


def missing() -> str | None:
    """Why Mooncake cannot be used here; None if it can."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake cannot be loaded: {error}"
    return None if _program().is_file() else f"there is no {_program()}"


def _program() -> Path:
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("there is no Mooncake; pip install mooncake-transfer-engine-non-cuda")
    return Path(spec.submodule_search_locations[0], "mooncake_master")


class Cluster:
    """A master and a client whose memory holds everything; both end with the test."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """``folder`` gets the logs; ``nbytes`` of memory for objects."""
        self._folder, self._nbytes = folder, nbytes
        self.port, self.metrics = _DICE.sample(_PORTS, 2)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Where it is, without a prefix."""
        return f"mooncake://{HOST}:{self.port}"

    def place(self, prefix: str) -> str:
        """The URL of a prefix."""
        return f"{self.url}/{prefix}?metrics={self.metrics}"

    def start(self) -> None:
        """Start both, and wait until they are ready.

        Raises:
            DeadlineError: they are not in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run(
            str(_program()),
            f"-rpc_address={HOST}",
            f"-rpc_port={self.port}",
            f"-metrics_host={HOST}",
            f"-metrics_port={self.metrics}",
            "-rpc_thread_num=2",
            "-put_start_discard_timeout_sec=2",
        )
        self._until_master()
        owner = self._run(
            sys.executable, "-c", _OWNER, f"{HOST}:{self.port}", str(self._nbytes), pipe=True
        )
        assert owner.stdout is not None
        if owner.stdout.readline().strip() != b"ready":
            self._fail("its client does not start")

    def kill_owner(self) -> None:
        """End the client whose memory holds everything."""
        self._processes[1].kill()
        self._processes[1].wait(_STOP_TIMEOUT)

    def stop(self) -> None:
        """End both."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(_STOP_TIMEOUT)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._processes = []

    def _run(self, *arguments: str, pipe: bool = False) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "TMPDIR": str(self._folder), "MC_LOG_LEVEL": "ERROR"},
                preexec_fn=_proc.die_with_parent,
            )
        self._processes.append(process)
        return process

    def _until_master(self) -> None:
        place = MooncakePlace(host=HOST, port=self.port, metrics=self.metrics, local=HOST)
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline and self._processes[0].poll() is None:
            try:
                place.check_master()
            except Unreachable:
                time.sleep(0.02)
            else:
                return
        self._fail("its master does not answer")

    def _fail(self, why: str) -> None:
        tail = (self._folder / "log").read_text(errors="replace")[-2000:]
        self.stop()
        raise DeadlineError(f"Mooncake does not start, {why}:\n{tail}")


@contextmanager
def serve(folder: Path, nbytes: int = 2**28) -> Iterator[Cluster]:
    """A running cluster for the length of a block.

    Raises:
        DeadlineError: it does not start.
    """
    for left in range(_TRIES, 0, -1):
        cluster = Cluster(folder, nbytes)
        try:
            cluster.start()
        except DeadlineError:
            if left == 1:
                raise
        else:
            break
    try:
        yield cluster
    finally:
        cluster.stop()
