"""One case of the store benchmarks: servers, and one or more clients that take turns together."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import Case, Extra, RankFailed, RankGroup
from core.ranks import free_port

from .equality import error_in
from .sizes import check_memory

__all__ = ["StoreSession"]

MODULE = "contenders.store"
MEMORY = Path("/dev/shm")
PROVIDERS = ("sapwood", "sapwood on demand", "sapwood tcp")
NEEDS = {
    "safetensors": "safetensors",
    "safetensors read": "safetensors",
    "hdf5": "h5py",
    "fastsafetensors": "fastsafetensors",
    "tensorizer": "tensorizer",
    "mooncake": "mooncake",
}
IN_MEMORY = (*PROVIDERS, "mooncake", "whole model")
"""Those that promise no more than memory."""
MILLISECONDS = ("save", "load", "attach")


class StoreSession:
    """Peers keep files: in memory for durability ``memory``, else on the disk."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.extra = case, Extra()
        self.clients = case.get("clients", 1)
        self.sizes = options["bytes"](case)
        check_memory(self.clients * int(self.sizes * options["copies"]))
        self.owned = contextlib.ExitStack()
        try:
            self.folder = self.new_folder()
            wanted = [name for name in names if self.runs(name)]
            servers = self.start(wanted)
            self.group = RankGroup(
                MODULE,
                world=self.clients,
                case=case,
                options={
                    "folder": str(self.folder),
                    "servers": servers,
                    "cold": options.get("cold", False),
                },
                timeout=600,
            )
            self.owned.callback(self.group.close)
            self.names = [name for name in wanted if self.create(name)]
        except BaseException:
            self.close()
            raise

    def new_folder(self) -> Path:
        parent = MEMORY if self.case["durability"] == "memory" else None
        folder = tempfile.mkdtemp(prefix="bench-", dir=parent)
        self.owned.callback(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def runs(self, name: str) -> bool:
        package = NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            return self.excluded(name, f"{package} is not installed")
        if self.case["durability"] == "memory":
            return True
        if name in IN_MEMORY and name != "sapwood":
            return self.excluded(name, "it promises memory only")
        return name != "sapwood folder" or self.excluded(name, "it is what sapwood is here")

    def excluded(self, name: str, reason: str) -> bool:
        if name == "sapwood":
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return False

    def create(self, name: str) -> bool:
        error = error_in(self.group.ask("call", function="create", contender=name))
        return error is None or self.excluded(name, error)

    def start(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        if self.case["durability"] != "memory":
            return {}
        found = {name: self.provider(name) for name in PROVIDERS if name in names}
        if "mooncake" in names:
            found["mooncake"] = self.mooncake()
        return found

    def provider(self, name: str) -> dict[str, Any]:
        """One or more ``sapwood store serve`` that keep in memory."""
        count = self.case.get("providers", 1)
        token = self.folder / f"token-{name.replace(' ', '-')}"
        token.write_text(secrets.token_hex(16))
        token.chmod(0o600)
        staging = "on_demand" if name.endswith("demand") else "preallocated"
        members = {f"p{at}": f"127.0.0.1:{free_port()}" for at in range(count)}
        listed = ",".join(f"{member}={address}" for member, address in members.items())
        for member, address in members.items():
            self.run(
                [
                    *(sys.executable, "-m", "sapwood", "store", "serve", "memory:"),
                    *("--name", member, "--listen", address, "--token-file", str(token)),
                    *("--members", listed),
                    *("--memory", f"{self.clients * 4 * self.sizes // 10**6 + 1000}MB"),
                    *("--staging", staging),
                ],
                address,
            )
        return {
            "place": "sapwood://" + ",".join(members.values()),
            "token": token.read_text(),
            "staging": staging,
            **({"local": False} if name.endswith("tcp") else {}),
        }

    def mooncake(self) -> dict[str, str]:
        program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
        master, metadata = free_port(), free_port()
        self.run(
            [
                program or "mooncake_master",
                f"--rpc_port={master}",
                "--rpc_address=127.0.0.1",
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={metadata}",
                f"--metrics_port={free_port()}",
            ],
            f"127.0.0.1:{master}",
        )
        return {
            "master": f"127.0.0.1:{master}",
            "metadata": f"http://127.0.0.1:{metadata}/metadata",
        }

    def run(self, command: Sequence[str], address: str) -> None:
        """Start a server and wait until it answers."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        self.owned.callback(errors.close)
        process = subprocess.Popen(command, stdout=errors, stderr=errors)
        self.owned.callback(stop, process)
        host, port = address.rsplit(":", 1)
        deadline = time.monotonic() + 60
        while not answers(host, int(port)):
            if process.poll() is not None or time.monotonic() > deadline:
                errors.seek(0)
                said = errors.read().decode(errors="replace")[-500:]
                raise RankFailed(f"{command[0]} did not start: {said}")
            time.sleep(0.05)

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.group.ask("call", function="turn", contender=contender)
        found = {key: max(answer[key] for answer in answers) for key in answers[0]}
        for key in found:
            if key in MILLISECONDS or key.startswith("part"):
                found[key] *= 1e3
        found["faults"] = statistics.median(answer["faults"] for answer in answers)
        return found

    def finish(self) -> Extra:
        size = self.group.ask("call", function="finish")[0]["bytes"]
        self.extra.facts["bytes of a model"] = f"{size / 1e6:.0f} MB"
        return self.extra

    def close(self) -> None:
        self.owned.close()


def answers(host: str, port: int) -> bool:
    import socket

    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
