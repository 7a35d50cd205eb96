"""A folder on a disk that writes at most so many MB/s, for everybody alike.

    python benchmarks/slowdisk.py --rate 50 -- sh -c 'dd if=/dev/zero of="$SLOW_DISK/x" bs=1M \\
        count=100 conv=fsync'

An ext4 file system on a loop device, whose image is a file in memory, so that nothing but the limit
sets its pace. The kernel's block layer holds writes back (blkio throttling of the device, for the
root group: whoever writes, with or without the page cache, and its own write-back). What a
contender calls durable cannot be faster than the limit, whatever it writes with.

The file system is mounted in a private mount namespace, which lives as long as a shell that waits
on a pipe of ours: however this process ends, the pipe closes, the shell lifts the limit, and the
kernel removes mount, loop device and image. Nothing is named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("unshare", "nsenter", "losetup", "mkfs.ext4", "mount", "dd")
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""Of cgroup v1. Version 2 has no limit for the root group, so write-back would escape it."""
IMAGES = Path("/dev/shm")
TRIAL_SECONDS = 0.5
TOLERANCE = 0.25
"""The block layer lets some bytes through before it begins to count."""
# $1 image, $2 folder, $3 limit file, $4 bytes per second. A journal would write everything small
# twice, and a file system that initialises itself in the background would take part of the rate.
HOLD = """
set -e
device=$(losetup --find --show "$1")
rm -f "$1"
number=$(printf '%d:%d' 0x$(stat -c %t "$device") 0x$(stat -c %T "$device"))
trap 'echo "$number 0" > "$3"; umount "$2"; losetup -d "$device"' EXIT
mkfs.ext4 -q -O ^has_journal -E lazy_itable_init=0 "$device"
mount "$device" "$2"
echo "$number $4" > "$3"
echo ready
cat
"""


class Unavailable(Exception):
    """No limited disk here; the text says why."""


def missing() -> str | None:
    """Why a limited disk cannot be made here, or None."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if absent:
        return f"these commands are missing: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "a disk of its own needs root"
    if not THROTTLE.exists():
        return f"{THROTTLE} is not there: limiting a device for all needs cgroup v1's blkio"
    return None


@dataclass(frozen=True)
class MeasuredDisk:
    nominal_mb: float
    mb: float

    def __str__(self) -> str:
        return f"{self.mb:.0f} MB/s measured, {self.nominal_mb:g} nominal"


class LimitedDisk:
    """Use as a context manager; ``folder`` is there for commands that ``command`` puts inside."""

    def __init__(self, mb_per_second: float, size: int = 4 << 30) -> None:
        """``size`` is the most it can hold; memory is used for what is written."""
        self.rate, self.size = mb_per_second, size
        self.holder: subprocess.Popen[bytes] | None = None
        self.measured = MeasuredDisk(mb_per_second, float("nan"))
        self.folder = Path()

    def __enter__(self) -> LimitedDisk:
        reason = missing()
        if reason:
            raise Unavailable(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="bench-disk-"))
        try:
            self.hold()
            self.verify()
        except BaseException:
            self.close()
            raise
        return self

    def hold(self) -> None:
        descriptor, image = tempfile.mkstemp(prefix="bench-disk-", dir=IMAGES)
        os.truncate(descriptor, self.size)
        os.close(descriptor)
        given = [image, str(self.folder), str(THROTTLE), f"{self.rate * 1e6:.0f}"]
        self.holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", HOLD, "hold", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
            start_new_session=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        answer = self.holder.stdout.readline()
        with contextlib.suppress(FileNotFoundError):
            Path(image).unlink()  # if the shell did not come that far
        if answer != b"ready\n":
            raise Unavailable(f"no disk: {self.holder.stderr.read().decode().strip()}")

    def verify(self) -> None:
        blocks = max(8, int(self.rate * TRIAL_SECONDS))
        path = self.folder / "trial"
        copy = f"dd if=/dev/zero of={path} bs=1000000 count={blocks} conv=fsync; rm -f {path}"
        command = self.command(["sh", "-c", copy])
        said = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
        seconds = float(said.splitlines()[-1].split(", ")[-2].split()[0])
        self.measured = MeasuredDisk(self.rate, blocks / seconds)
        if self.measured.mb > self.rate * (1 + TOLERANCE):
            raise Unavailable(f"the limit does not hold: {self.measured}")

    def command(self, command: list[str]) -> list[str]:
        assert self.holder is not None, "enter the context first"
        return ["nsenter", f"--target={self.holder.pid}", "--mount", "--", *command]

    def close(self) -> None:
        if self.holder is not None:
            for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
                if pipe is not None:
                    pipe.close()
            try:
                self.holder.wait(60)
            except subprocess.TimeoutExpired:
                self.holder.kill()
                self.holder.wait()
            self.holder = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, required=True, metavar="MB", help="limit in MB/s")
    parser.add_argument("command", nargs="+", help="what to run; $SLOW_DISK is the folder")
    given = parser.parse_args()
    try:
        with LimitedDisk(given.rate) as disk:
            print(f"disk: {disk.measured}", file=sys.stderr)
            environment = {**os.environ, "SLOW_DISK": str(disk.folder)}
            return subprocess.run(disk.command(given.command), env=environment).returncode
    except Unavailable as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
