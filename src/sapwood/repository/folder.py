"""A repository in a folder: its catalog beside its packs."""

from __future__ import annotations

from pathlib import Path

from sapwood.errors import ConfigError, StoreError
from sapwood.repository.database import Database
from sapwood.repository.local import LocalBackend
from sapwood.storage.folder import FolderKeeper

__all__ = ["CATALOG", "SERVED", "check_folder", "is_repository", "open_folder"]

CATALOG = "catalog.db"
SERVED = "provider.lock"
"""What the folder of a provider has in it."""


def open_folder(keeper: FolderKeeper, name: str, *, create: bool) -> LocalBackend:
    """Open the repository in a keeper's folder, or make it; ``name`` is the user's word for it.

    Raises:
        ConfigError: there is none and none is to be made, or the folder holds something else.
        StoreError: it cannot be opened.
    """
    check_folder(keeper.folder, create=create)
    try:
        keeper.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {keeper.folder}: {error.strerror}") from error
    database = Database(keeper.folder / CATALOG, wal=not keeper.on_network)
    return LocalBackend(name, database, keeper)


def is_repository(folder: Path) -> bool:
    """Whether there is a repository in a folder."""
    return (folder / CATALOG).is_file()


def check_folder(folder: Path, *, create: bool) -> None:
    """See that a repository is in a folder, or can be made there.

    Raises:
        ConfigError: there is none and none is to be made, or the folder holds something else.
    """
    if is_repository(folder):
        return
    if (folder / SERVED).is_file():
        raise ConfigError(
            f"{folder} is kept by a provider: open sapwood://host:port, where `sapwood store serve "
            f"{folder}` says it listens"
        )
    if not create:
        raise ConfigError(
            f"there is no repository in {folder}; make one with `sapwood store put`, or in Python "
            "with create=True"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds something else; name a folder that is empty or not there"
        )
