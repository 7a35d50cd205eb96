"""What ranks leave for ``sapwood run``: how long a stop may take, and that it is done.

The launcher names a folder in the environment; under another launcher nothing is written.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.runtime.textfile import replace_text

__all__ = ["NOTES", "LaunchNote", "read_notes"]

NOTES = "SAPWOOD_LAUNCH_NOTES"
log = logging.getLogger(__name__)


class LaunchNote:
    """The note of one rank."""

    def __init__(self, rank: int) -> None:
        """Nothing is written yet."""
        folder = os.environ.get(NOTES)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._path = None if folder is None else Path(folder) / attempt / f"{rank}.json"

    def write(self, **facts: Any) -> None:
        """Replace what it says."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(facts))
        except OSError as error:
            log.info("cannot leave a note for the launcher: %s", error)

    def remove(self) -> None:
        """This rank's run ended by itself."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """The notes of the latest attempt."""
    attempts = [p for p in folder.glob("*") if p.name.isdigit()] if folder.is_dir() else []
    latest = max(attempts, key=lambda p: int(p.name), default=None)
    notes = []
    for path in latest.glob("*.json") if latest is not None else ():
        with suppress(OSError, ValueError):
            notes.append(json.loads(path.read_text()))
    return notes
