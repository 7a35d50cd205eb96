"""How much memory can still be had, before the system kills somebody for it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can still allocate: on the machine, and within its container.

    What cannot be read limits nothing: outside of a container there is no limit to read.
    """
    free = _field(_MEMINFO, "MemAvailable:") * 1024
    limit = _number(_CGROUP / "memory.max")
    if limit is None:  # no cgroup v2, or no limit
        return free
    used = _number(_CGROUP / "memory.current") or 0
    # The page cache of files is counted, and goes when memory is needed; shared memory stays.
    cached = _field(_CGROUP / "memory.stat", "inactive_file")
    return min(free, max(limit - used + cached, 0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0 if path != _MEMINFO else 2**62
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
