"""Network namespaces without a name, which end with the process that made them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sapwood.errors import LaunchError

__all__ = ["Namespace", "Unavailable", "enter", "missing"]

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_PLACES = "/usr/sbin:/sbin"
_CLONE_NEWNET = 0x40000000
_COMMAND_SECONDS = 60
_END_SECONDS = 10


class Unavailable(LaunchError):
    """Namespaces or limited links cannot be made here; the text says why."""


def missing() -> str | None:
    """Why no namespace can be made here, or None."""
    absent = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    if absent:
        return f"these commands are missing: {', '.join(absent)} (packages util-linux, iproute2)"
    if os.geteuid() != 0:
        return "a private network namespace needs root"
    return None


def enter(path: str) -> None:
    """Move the calling thread, and threads it starts from now on, to the namespace at ``path``."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


class Namespace:
    """A network namespace that is there as long as a ``cat`` which waits on a pipe of ours.

    However this process ends, the pipe closes, the ``cat`` ends, and the kernel removes the
    namespace with its interfaces as soon as nobody else is inside. ``close`` does so now.
    """

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._wait_ready()
            self.run("", ["ip", "link", "set", "lo", "up"])
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        stdin, stdout, stderr = self._holder.stdin, self._holder.stdout, self._holder.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: PT018
        with suppress(BrokenPipeError):
            stdin.write(b"ready\n")
            stdin.flush()
        # The echo proves that unshare has become cat: the namespace exists.
        if stdout.readline() != b"ready\n":
            raise Unavailable(f"unshare --net: {stderr.read().decode().strip()}")

    @property
    def pid(self) -> int:
        """A process inside; ``ip`` takes it as the name of the namespace."""
        return self._holder.pid

    @property
    def path(self) -> Path:
        """What ``enter`` takes."""
        return Path(f"/proc/{self.pid}/ns/net")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` inside."""
        return ["nsenter", f"--target={self.pid}", "--net", "--", *command]

    def run(self, text: str, command: Sequence[str]) -> str:
        """Run a command inside, with ``text`` as its input; what it says."""
        done = subprocess.run(
            self.command(command),
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            env={**os.environ, "PATH": _path()},
        )
        if done.returncode != 0:
            raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def close(self) -> None:
        """End the process that keeps the namespace."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._holder.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), _PLACES])
