"""What storage does this node have? A short look, so that users need not know.

A place is worth a tier of its own when it is on a disk of this node and either the checkpoints' own
place is on a network, or it is clearly faster than that.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sapwood.errors import TierError
from sapwood.storage.filesystems import filesystem_of, kind_of

__all__ = ["Storage", "best_local", "look_at", "usual_places"]

_VARIABLES = ("SAPWOOD_LOCAL", "SLURM_TMPDIR", "LOCAL_SCRATCH", "JOB_TMPDIR", "PBS_JOBFS", "TMPDIR")
_FOLDERS = ("/local_scratch", "/localscratch", "/scratch/local", "/mnt/nvme", "/nvme")
_BLOCK = 4 * 2**20
_CLEARLY_FASTER = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A folder, what is under it, and how fast it takes bytes."""

    folder: Path
    filesystem: str
    kind: str
    """``disk`` (of this node), ``network`` or ``memory``."""
    free: int
    bytes_per_second: float
    """Written and synced, in a short test."""


def look_at(folder: Path, *, seconds: float = 0.3, limit: int = 64 * 2**20) -> Storage:
    """Write to a folder for a moment and measure.

    Raises:
        TierError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filesystem = filesystem_of(folder)
        return Storage(
            folder=folder,
            filesystem=filesystem,
            kind=kind_of(filesystem),
            free=_free(folder),
            bytes_per_second=_speed(folder, seconds, limit),
        )
    except OSError as error:
        raise TierError(f"cannot write to {folder}: {error.strerror or error}") from error


def usual_places(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Where clusters and workstations keep a node's own disk; only those that are there."""
    named = [environment[name] for name in _VARIABLES if environment.get(name)]
    found = dict.fromkeys(Path(place) for place in (*named, *_FOLDERS))
    return [p for p in found if p.is_dir() and os.access(p, os.W_OK | os.X_OK)]


def best_local(
    home: Storage, places: Iterable[Path], *, need: int, seconds: float = 0.3
) -> Storage | None:
    """The fastest disk of this node that is worth a tier beside ``home``; None if there is none.

    ``need`` is the number of bytes that must fit.
    """
    found = []
    for place in places:
        try:
            storage = look_at(place, seconds=seconds)
        except TierError:
            continue
        if storage.kind == "disk" and storage.free >= need:
            found.append(storage)
    if not found:
        return None
    best = max(found, key=lambda s: s.bytes_per_second)
    faster = best.bytes_per_second > _CLEARLY_FASTER * home.bytes_per_second
    return best if home.kind == "network" or faster else None


def _speed(folder: Path, seconds: float, limit: int) -> float:
    block = os.urandom(_BLOCK)  # zeros would be fast where a disk compresses
    written = 0
    with tempfile.TemporaryFile(dir=folder, prefix=".sapwood-probe-", buffering=0) as file:
        start = time.perf_counter()
        while written < limit and (not written or time.perf_counter() - start < seconds):
            written += file.write(block)
            os.fsync(file.fileno())
        return written / (time.perf_counter() - start)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
