"""A private network namespace whose loopback is limited to a rate, checked by a transfer.

    python benchmarks/netns.py --rate 8 -- python train.py      # Gbit/s

The namespace lives as long as a ``cat`` that waits on a pipe of ours: however this process ends,
the pipe closes, the ``cat`` ends, and the kernel removes namespace and limit. Nothing is named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "tc")
# The loopback's MTU is 64 KiB and offloaded packets are as long, so a bucket below that passes
# nothing; and it must hold what the rate lets through between two wake-ups of the queue.
BURST_BYTES = 1 << 20
QUEUE_MS = 50
TRIAL_SECONDS = 1.0
TRIAL_WARM_SECONDS = 0.2
# Both directions of a loopback share the limit, and acknowledgements take a little of it.
TOLERANCE = 0.15


class Unavailable(Exception):
    """No limited link here; the text says why."""


def missing() -> str | None:
    """Why a limited link cannot be made here, or None."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if absent:
        return f"these commands are missing: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "a private network namespace needs root"
    return None


def run(command: list[str]) -> str:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Measured:
    nominal_gbit: float
    gbit: float

    def __str__(self) -> str:
        return f"{self.gbit:.2f} Gbit/s measured, {self.nominal_gbit:g} nominal"


class LimitedLoopback:
    """Use as a context manager; ``command`` puts a command inside."""

    def __init__(self, gbit: float) -> None:
        self.gbit = gbit
        self.holder: subprocess.Popen[bytes] | None = None
        self.measured = Measured(gbit, float("nan"))

    def __enter__(self) -> LimitedLoopback:
        reason = missing()
        if reason:
            raise Unavailable(reason)
        try:
            self.hold()
            self.limit()
            self.verify()
        except BaseException:
            self.close()
            raise
        return self

    def hold(self) -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        try:
            self.holder.stdin.write(b"ready\n")
            self.holder.stdin.flush()
        except BrokenPipeError:
            pass
        # The echo proves that unshare has become cat: the namespace exists.
        if self.holder.stdout.readline() != b"ready\n":
            raise Unavailable(f"unshare: {self.holder.stderr.read().decode().strip()}")

    def limit(self) -> None:
        rate = f"{self.gbit * 1000:.0f}mbit"
        run(self.command(["ip", "link", "set", "lo", "up"]))
        shape = f"rate {rate} burst {BURST_BYTES} latency {QUEUE_MS}ms"
        run(self.command(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *shape.split()]))

    def verify(self) -> None:
        answer = run(self.command([sys.executable, str(Path(__file__).resolve()), "--measure"]))
        self.measured = Measured(self.gbit, json.loads(answer)["gbit"])
        if self.measured.gbit > self.gbit * (1 + TOLERANCE):
            raise Unavailable(f"the limit does not hold: {self.measured}")

    def command(self, command: list[str]) -> list[str]:
        assert self.holder is not None, "enter the context first"
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--", *command]

    def close(self) -> None:
        if self.holder is None:
            return
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self.holder.wait(10)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            self.holder.wait()
        self.holder = None

    def __exit__(self, *_: object) -> None:
        self.close()


def receive(listener: socket.socket, marks: list[tuple[float, int]]) -> None:
    """Counts bytes after a short warm-up, in which the bucket's burst passes for free."""
    connection, _ = listener.accept()
    buffer = bytearray(1 << 20)
    started, begun, count = time.perf_counter(), 0.0, 0
    with connection:
        while length := connection.recv_into(buffer):
            now = time.perf_counter()
            if begun:
                count += length
                marks.append((now - begun, count))
            elif now - started >= TRIAL_WARM_SECONDS:
                begun = now


def loopback_gbit() -> float:
    marks: list[tuple[float, int]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=receive, args=(listener, marks))
        receiver.start()
        with socket.create_connection(listener.getsockname()) as sender:
            end = time.perf_counter() + TRIAL_WARM_SECONDS + TRIAL_SECONDS
            while time.perf_counter() < end:
                sender.sendall(bytes(1 << 20))
        receiver.join(10)
    seconds, count = marks[-1]
    return count * 8 / seconds / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, metavar="GBIT", help="limit in Gbit/s")
    parser.add_argument("--measure", action="store_true", help="only measure this loopback")
    parser.add_argument("command", nargs="*", help="what to run inside")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps({"gbit": loopback_gbit()}))
        return 0
    if not given.rate:
        parser.error("--rate is missing")
    try:
        with LimitedLoopback(given.rate) as link:
            print(f"loopback: {link.measured}", file=sys.stderr)
            return subprocess.run(link.command(given.command)).returncode if given.command else 0
    except Unavailable as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
