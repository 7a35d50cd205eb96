"""Opening a repository, by path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from sapwood.errors import ConfigError, StoreError
from sapwood.storage import Durability, Keeper, open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.store.database import Database
from sapwood.store.local import LocalBackend
from sapwood.store.repository import Repository, durability_of

__all__ = ["open"]

_CATALOG = "catalog.db"


def open(
    place: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability | str | None = None,
) -> Repository:
    """Open a repository, or make it.

    Args:
        place: a folder, or ``memory:`` for one that ends with this process.
        create: whether to make it where there is none.
        durability: what ``save`` promises unless it is told otherwise: ``"memory"``, ``"written"``
            (survives every process; the default), ``"synced"`` (survives a power cut).

    Raises:
        ConfigError: there is no such place, or no such durability.
        StoreError: it cannot be opened.
    """
    promised = None if durability is None else durability_of(durability)
    if place == "memory:":
        return _opened("memory:", Database(None), open_keeper("memory:"), promised)
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        raise ConfigError(f"{place!r}: expected a folder, or memory:")
    keeper = open_keeper(place)
    assert isinstance(keeper, FolderKeeper)
    _check(keeper.folder, create=create)
    try:
        keeper.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {keeper.folder}: {error.strerror}") from error
    database = Database(keeper.folder / _CATALOG, wal=not keeper.on_network)
    return _opened(str(place), database, keeper, promised)


def _opened(
    name: str, database: Database, keeper: Keeper, promised: Durability | None
) -> Repository:
    backend = LocalBackend(name, database, keeper)
    if promised is not None and promised > keeper.durability:
        backend.close()
        raise ConfigError(
            f"{name} can promise {keeper.durability.name.lower()!r} at most, not "
            f"{promised.name.lower()!r}"
        )
    usual = min(Durability.WRITTEN, keeper.durability)
    return Repository(backend, durability=usual if promised is None else promised)


def _check(folder: Path, *, create: bool) -> None:
    if (folder / _CATALOG).exists():
        return
    if not create:
        raise ConfigError(
            f"there is no repository in {folder}; save something first, or open it with create=True"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds something else; name a folder that is empty or not there"
        )
