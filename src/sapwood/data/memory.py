"""How much memory this process may use."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available"]

_MEMINFO = Path("/proc/meminfo")
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available() -> int:
    """Bytes that can be used without swapping: what is free or can be freed, within the limit.

    The page cache of a file counts against a container's limit, so a container's limit counts here.
    """
    found = 2**62
    for line in _text(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    for limit in _LIMITS:
        text = _text(limit).strip()
        if text.isdigit():
            found = min(found, int(text))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
