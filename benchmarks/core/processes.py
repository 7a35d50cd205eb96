"""CPU time of a group of ranks and of everything they started, also what outlives them.

Every process of a group inherits a mark in its environment. Children of children and processes that
detached carry it too, so no contender can hide work in a helper process.
"""

from __future__ import annotations

import os
from pathlib import Path

GROUP_MARK = "SAPWOOD_BENCH_GROUP"
# Of /proc/<pid>/stat behind the name: user and system time, own and of children that were reaped.
CPU_FIELDS = slice(11, 15)


def marked(pid: str, mark: bytes) -> bool:
    return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def cpu_ticks(pid: str) -> int:
    # The name is in brackets and may hold anything, so count from the last bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[CPU_FIELDS]))


def group_cpu_seconds() -> float:
    """Of all processes that carry this process's mark; a tick (10 ms) is the resolution."""
    mark = f"{GROUP_MARK}={os.environ[GROUP_MARK]}".encode()
    ticks = 0
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if marked(pid, mark):
                ticks += cpu_ticks(pid)
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return ticks / os.sysconf("SC_CLK_TCK")
