"""The folders of a place: one per save, and what is on its way to be one.

    ckpts/incoming/3f9a1c….bin    what a rank writes; nobody reads it
    ckpts/dcp-00000002/           a save: rank-0.bin ..., and manifest.json, which was made last
    ckpts/dcp-00000003.partial/   a save being put together
    ckpts/dcp-00000001.dropped/   one being removed

Ranks need not agree on a name before they write: the coordinator moves their files together.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.storage.files import Files

__all__ = [
    "INCOMING",
    "MANIFEST",
    "claim",
    "clear_leftovers",
    "drop",
    "forget",
    "place_of",
    "saves",
]

INCOMING = "incoming"
MANIFEST = "manifest.json"
_NAME = re.compile(r"dcp-(\d{8,})(\.\w+)?")
_LEFTOVER_SECONDS = 3600.0  # what nobody has touched for so long belongs to a save that died


def place_of(place: object) -> Path:
    """The folder a user or DCP's ``checkpoint_id`` means.

    Raises:
        ConfigError: it is a URL.
    """
    text = str(place)
    if "://" in text:
        raise ConfigError(f"{text}: DCP saves go to a folder that all ranks share, not to a URL")
    return Path(text)


def saves(place: Path) -> list[str]:
    """The names of published saves, newest first."""
    return [name for _, name, rest in sorted(_entries(place), reverse=True) if not rest]


def claim(place: Path, files: Files) -> str:
    """Make the draft folder of a new save, newer than all there are; the save's name."""
    files.make_folder(place)
    number = max((number for number, _, _ in _entries(place)), default=0)
    while True:
        number += 1
        try:
            (place / f"dcp-{number:08d}.partial").mkdir()
        except FileExistsError:  # another save, at this very moment
            continue
        files.sync_folder(place)
        return f"dcp-{number:08d}"


def _entries(place: Path) -> list[tuple[int, str, str]]:
    """Number, name, and what follows the name of all that are or were saves."""
    try:
        names = [entry.name for entry in place.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(int(m[1]), name, m[2] or "") for name in names if (m := _NAME.fullmatch(name))]


def drop(place: Path, name: str, files: Files) -> None:
    """Remove a save: its name first, so that no half of it is ever taken for a whole."""
    grave = place / f"{name}.dropped"
    with suppress(FileNotFoundError):
        files.publish(place / name, grave)
    files.sync_folder(place)
    files.remove_tree(grave)


def forget(place: Path, partial: str, incoming: Iterable[str]) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(place / partial, ignore_errors=True)
    for name in incoming:
        with suppress(OSError):
            (place / INCOMING / name).unlink()


def clear_leftovers(place: Path) -> None:
    """Remove what saves that died have left behind long ago."""
    entries = [*place.glob("dcp-*.partial"), *place.glob("dcp-*.dropped")]
    entries += (place / INCOMING).glob("*.bin")
    for entry in entries:
        with suppress(FileNotFoundError):
            if time.time() - entry.stat().st_mtime < _LEFTOVER_SECONDS:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
