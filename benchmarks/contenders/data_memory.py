"""How much memory a process and its children need that the kernel cannot simply drop."""

from __future__ import annotations

import time
from pathlib import Path

FIELDS = (b"Pss_Anon:", b"Pss_Shmem:")
EVERY = 0.03


def family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def held(pid: int) -> int:
    """Bytes, anonymous and shared; what processes share is divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(FIELDS)) * 1024


def held_by_all(pid: int) -> int:
    total = 0
    try:
        members = family(pid)
    except OSError:
        return 0
    for member in members:
        try:
            total += held(member)
        except OSError:  # it ended meanwhile
            continue
    return total


class Peak:
    """The highest of some looks, above the first."""

    def __init__(self, pid: int) -> None:
        self.pid, self.first = pid, held_by_all(pid)
        self.most, self.looked = self.first, 0.0

    def look(self) -> None:
        if time.monotonic() - self.looked < EVERY:
            return
        self.most = max(self.most, held_by_all(self.pid))
        self.looked = time.monotonic()

    @property
    def grown(self) -> int:
        return self.most - self.first
