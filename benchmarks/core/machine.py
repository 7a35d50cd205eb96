"""Facts about the machine that a reader needs, and none that name it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
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


class Meter:
    """How much of the machine went to others meanwhile; call ``read`` after children were reaped.

    Load average cannot tell our own ranks from foreign work. CPU time can: what all processes used
    less what this process and its ended children used.
    """

    def __init__(self) -> None:
        self.started, self.ours, (self.busy, self.steal) = time.monotonic(), own_cpu(), all_cpu()

    def read(self) -> dict[str, float]:
        capacity = (time.monotonic() - self.started) * len(os.sched_getaffinity(0))
        busy, steal = all_cpu()
        foreign = max(0.0, busy - self.busy - (own_cpu() - self.ours))
        return {
            "foreign": round(foreign / capacity, 3),
            "steal": round((steal - self.steal) / capacity, 3),
        }


def own_cpu() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(item.ru_utime + item.ru_stime for item in used)


def all_cpu() -> tuple[float, float]:
    """Seconds of all processors in processes, and stolen by the hypervisor."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system = ticks[:3]
    second = os.sysconf("SC_CLK_TCK")
    return (user + nice + system) / second, ticks[7] / second


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


def meter_warning(read: dict[str, float]) -> str | None:
    if max(read.values()) <= 0.05:
        return None
    return f"other work took {read['foreign']:.0%} of the cores, the hypervisor {read['steal']:.0%}"


def load_warning(seconds: float = 2.0) -> str | None:
    """A message when other work runs here, because timings then say little.

    It is watched for a moment: the load average still counts the benchmark that has just ended.
    """
    meter = Meter()
    time.sleep(seconds)
    found = meter_warning(meter.read())
    return f"before the run {found}" if found else None
