"""Facts about the machine that a reader needs, and none that name it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
# A recorded benchmark changes these, and must not make the next one look unclean.
RECORDS = ("benchmarks/results", "benchmarks/RESULTS.md")


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def revision() -> str:
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown (not a git checkout)"
    changed = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in RECORDS))
    return f"{commit}, {'uncommitted changes' if changed else 'clean'}"


def field_of(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(found, "unknown")


def memory() -> str:
    total = field_of("/proc/meminfo", "MemTotal").split()
    return f"{int(total[0]) / 2**20:.1f} GiB" if total[0].isdigit() else "unknown"


def load_average() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def facts() -> dict[str, Any]:
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": field_of("/proc/cpuinfo", "model name"),
        "memory": memory(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revision": revision(),
    }


def load_warning(load: float) -> str | None:
    """A message when other work runs here, because timings then say little."""
    cores = len(os.sched_getaffinity(0))
    if load <= 0.5 * cores:
        return None
    return f"load average {load:.2f} on {cores} cores before the run: other work disturbs timings"
