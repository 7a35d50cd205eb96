"""Starting a node's engine as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from sapwood.checkpoint.engine.address import Address
from sapwood.errors import CheckpointError
from sapwood.regular import open_regular, read_regular

__all__ = ["launch"]

_TIMEOUT = 60.0
_SHOWN = 2000


def launch(address: Address, token: str, *, linger: float, log: Path | None) -> None:
    """Start an engine; returns when one has the address, be it this or a faster one.

    Raises:
        CheckpointError: none could be started.
    """
    order = {
        "name": address.name,
        "token_file": str(address.token_file),
        "token": token,
        "linger": linger,
    }
    # Through a pipe: arguments and environment can be read by others.
    receiver, sender = os.pipe()
    try:
        with os.fdopen(sender, "w") as file:
            json.dump(order, file)
        _run(receiver, log)
    finally:
        os.close(receiver)


def _run(receiver: int, log: Path | None) -> None:
    command = [sys.executable, "-P", "-m", "sapwood.checkpoint.engine", str(receiver)]
    output = _open(log)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(receiver,),
            start_new_session=True,
            env=_environment(),
        )
        try:
            code = child.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_TIMEOUT)
            raise CheckpointError(f"the engine did not start in {_TIMEOUT:g} s") from None
    except OSError as error:
        raise CheckpointError(f"cannot start the engine: {error}") from error
    finally:
        if output >= 0:
            os.close(output)
    if code:
        raise CheckpointError(f"the engine did not start (exit code {code}){_last_words(log)}")


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])  # of the very package that runs here
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    # numpy would start a thread per core for algebra that an engine never does.
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _open(log: Path | None) -> int:
    if log is not None:
        with suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            return open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _last_words(log: Path | None) -> str:
    if log is None:
        return ""
    with suppress(OSError):
        return f"; {log} ends with:\n{read_regular(log).decode(errors='replace')[-_SHOWN:]}"
    return ""
