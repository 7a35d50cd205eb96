"""The disk that is limited for everybody, and that it leaves nothing behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import slowdisk

pytestmark = pytest.mark.skipif(
    slowdisk.missing() is not None, reason="no limited disk can be made here"
)
BENCHMARKS = Path(slowdisk.__file__).parent


def loop_devices() -> str:
    return subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout


def test_what_is_written_waits_for_the_limit_and_nothing_stays() -> None:
    before = loop_devices()
    with slowdisk.LimitedDisk(40, size=64 << 20) as disk:
        assert disk.measured.mb < 50
        inside = disk.command(["stat", "-f", "-c", "%T", str(disk.folder)])
        found = subprocess.run(inside, capture_output=True, text=True).stdout
        assert found.startswith("ext")
        assert not os.path.ismount(disk.folder)  # for nobody else
        folder = disk.folder
    assert not folder.exists()
    assert loop_devices() == before


def test_a_disk_goes_with_a_killed_benchmark() -> None:
    before, limits = loop_devices(), slowdisk.THROTTLE.read_text()
    code = "import slowdisk\nwith slowdisk.LimitedDisk(40, size=64 << 20) as disk:\n"
    code += "    print(disk.holder.pid, disk.folder, flush=True)\n    input()\n"
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    holder = os.pidfd_open(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert select.select([holder], [], [], 30)[0]  # it has ended
    os.close(holder)
    assert slowdisk.THROTTLE.read_text() == limits
    assert loop_devices() == before
    Path(folder).rmdir()  # an empty folder is all that is left
