"""Opening a repository, by path or URL."""

from __future__ import annotations

import os

from sapwood.errors import ConfigError
from sapwood.repository.database import Database
from sapwood.repository.folder import open_folder
from sapwood.repository.local import LocalBackend
from sapwood.storage import Durability, open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.store.repository import Repository, durability_of

__all__ = ["open"]


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
        backend = LocalBackend("memory:", Database(None), open_keeper("memory:"))
        return _opened(backend, promised)
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        raise ConfigError(f"{place!r}: expected a folder, or memory:")
    keeper = open_keeper(place)
    assert isinstance(keeper, FolderKeeper)
    return _opened(open_folder(keeper, str(place), create=create), promised)


def _opened(backend: LocalBackend, promised: Durability | None) -> Repository:
    most = backend.keeper.durability
    if promised is not None and promised > most:
        backend.close()
        raise ConfigError(
            f"{backend.name} can promise {most.name.lower()!r} at most, not "
            f"{promised.name.lower()!r}"
        )
    usual = min(Durability.WRITTEN, most)
    return Repository(backend, durability=usual if promised is None else promised)
