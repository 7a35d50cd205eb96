"""The folders of a place: one per save, and what is on its way to be one.

    ckpts/incoming/3f9a1c….bin      what a rank writes; nobody reads it
    ckpts/dcp-00000002-3f9a1c/      a save: rank-0.bin ..., and manifest.json, which was made last
    ckpts/dcp-00000003-77b0aa.partial/   a save being put together
    ckpts/dcp-00000001-3f9a1c.dropped/   one being removed

Ranks need not agree on a name before they write: the coordinator moves their files together.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.tiers.files import Files

__all__ = ["INCOMING", "MANIFEST", "clear_leftovers", "drop", "new_name", "place_of", "saves"]

INCOMING = "incoming"
MANIFEST = "manifest.json"
_NAME = re.compile(r"dcp-(\d{8,})-([0-9a-f]{6})")
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
    try:
        names = [entry.name for entry in place.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(m[1]), m[2], name) for name in names if (m := _NAME.fullmatch(name))]
    return [name for _, _, name in sorted(found, reverse=True)]


def new_name(place: Path) -> str:
    """A name that is newer than all there are, and nobody else's."""
    newest = _NAME.fullmatch(next(iter(saves(place)), ""))
    number = int(newest[1]) + 1 if newest else 1
    return f"dcp-{number:08d}-{secrets.token_hex(3)}"


def drop(place: Path, name: str, files: Files) -> None:
    """Remove a save: its name first, so that no half of it is ever taken for a whole."""
    grave = place / f"{name}.dropped"
    with suppress(FileNotFoundError):
        files.publish(place / name, grave)
    files.sync_folder(place)
    files.remove_tree(grave)


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
