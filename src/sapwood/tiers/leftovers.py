"""What killed runs left unfinished, and when it may be cleared away.

A run that is killed in mid-save leaves drafts, data files without a record, folders that were never
published, open uploads. Nobody lists them and nobody reads them, but they take room. They must not
be taken for what another run is writing to the same place at this moment, so all of this must hold:

- they are of another attempt than that of whoever clears up, which may still be writing its own;
- they are of no later step than a checkpoint that is whole: nobody will miss them;
- nothing in them has changed for an hour, by the clock of the file system they are on: whoever
  wrote them is dead, or was given up.

Should a run be that slow and alive, it loses the checkpoint of that step and no other: what it
writes next finds its folder gone, fails, and is tried again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from sapwood.storage.files import Files
from sapwood.tiers.record import CheckpointId

__all__ = ["QUIET_SECONDS", "Clearable", "Stale", "clear_folders", "clock_of", "is_draft"]

QUIET_SECONDS = 3600.0
"""How long nothing must have changed."""
_DRAFT = re.compile(r"\..+\.draft-.+")


@dataclass(frozen=True, kw_only=True)
class Stale:
    """What may be cleared away, if it is not finished."""

    attempt: str
    """Whoever clears up; its own is never touched."""
    step: int
    """Of a checkpoint that is whole."""
    quiet: float = QUIET_SECONDS
    """Seconds for which nothing may have changed."""

    def covers(self, id: CheckpointId) -> bool:
        """Whether a checkpoint is old enough to be judged."""
        return id.attempt != self.attempt and id.step <= self.step

    def is_quiet(self, path: Path, now: float) -> bool:
        """Whether nothing in a folder has changed for long enough."""
        return now - _changed(path) >= self.quiet


@runtime_checkable
class Clearable(Protocol):
    """A tier that can hold what a killed run left unfinished."""

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove it; of which checkpoints there was something.

        Raises:
            TierError: it could not be done now.
        """
        ...


def clock_of(folder: Path, entries: Iterable[Path]) -> float:
    """The time, as the file system sees it: what was just written there is the newest.

    The clock of a file server may be behind ours, and would make young files seem old.
    """
    return min(time.time(), max(map(_modified, (folder, *entries)), default=0.0))


def clear_folders(
    files: Files, folder: Path, stale: Stale, unfinished: Callable[[Collection[str]], set[str]]
) -> list[CheckpointId]:
    """Remove from checkpoints' folders what ``unfinished`` says of their names, and empty ones.

    Returns of which checkpoints there was something. What nobody knows is somebody's, and stays.
    """
    homes = [folder / name for name in sorted(_names(folder))]
    now = clock_of(folder, homes)
    cleared = []
    for home in homes:
        id = CheckpointId.parse(home.name)
        if id is None or not stale.covers(id) or not stale.is_quiet(home, now):
            continue
        if _clear(files, home, unfinished):
            cleared.append(id)
    return cleared


def _clear(files: Files, home: Path, unfinished: Callable[[Collection[str]], set[str]]) -> bool:
    names = _names(home)
    going = unfinished(names)
    for name in sorted(going):
        files.remove(home / name)
    if going != names:
        return bool(going)
    with suppress(OSError):  # somebody has put something in
        home.rmdir()
    return True


def is_draft(name: str) -> bool:
    """Whether a file is one that never got its final name."""
    return _DRAFT.fullmatch(name) is not None


def _changed(path: Path) -> float:
    """When something in it was last written, or got its name."""
    # Unlike rglob, walk does not mind what others remove meanwhile.
    inside = (Path(home, name) for home, _, names in os.walk(path) for name in (".", *names))
    return max((_modified(one) for one in (path, *inside)), default=0.0)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # renamed or removed just now
        return 0.0


def _names(home: Path) -> set[str]:
    try:
        return {entry.name for entry in home.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
