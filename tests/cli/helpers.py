"""Running the command line as a user does, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import sapwood as sapwood_package

DEADLINE = 100.0


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """No launcher's variables, and temporary files where the test can see them."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMI_", "SAPWOOD_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    # The processes we start must find the same sapwood as this one, from any folder.
    source = str(Path(sapwood_package.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    # One thread each: with small tensors on busy cores, more of them only wait for each other.
    own = {"TMPDIR": str(temporary), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return {**env, **own, **more}


def sapwood(*args: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``sapwood`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "sapwood.cli", *args],
        cwd=tmp_path,
        env=environment(tmp_path, **more),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def start(*args: str, tmp_path: Path, **more: str) -> subprocess.Popen[str]:
    """Start ``sapwood`` and leave it running."""
    return subprocess.Popen(
        [sys.executable, "-m", "sapwood.cli", *args],
        cwd=tmp_path,
        env=environment(tmp_path, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, what: str) -> None:
    """Poll until ``condition()`` holds; a deadline, not a measure of speed."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids_in(folder: Path) -> list[int]:
    """Process ids that ranks wrote down as file names."""
    return [int(path.name) for path in folder.glob("[0-9]*")]
