"""Opening a repository, by path or URL."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from sapwood.errors import ConfigError
from sapwood.repository.base import Backend
from sapwood.repository.database import Database
from sapwood.repository.folder import is_repository, open_folder
from sapwood.repository.local import LocalBackend
from sapwood.repository.objects.layout import MARKER
from sapwood.repository.objects.opening import open_objects
from sapwood.storage import Durability, Keeper, open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.store.repository import Repository, durability_of

__all__ = ["open"]

_OBJECTS = ("s3://", "mooncake://")


def open(
    place: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability | str | None = None,
    shared: bool | None = None,
    **options: Any,
) -> Repository:
    """Open a repository, or make it.

    Args:
        place: a folder, ``s3://bucket/prefix``, ``mooncake://host:port/prefix``, or ``memory:`` for
            one that ends with this process.
        create: whether to make it where there is none.
        durability: what ``save`` promises unless it is told otherwise: ``"memory"``, ``"written"``
            (survives every process; the default), ``"synced"`` (survives a power cut),
            ``"replicated"`` (survives the loss of a machine).
        shared: for a folder on a network file system that several machines write to: it has no
            database, and nothing is mapped. None takes it as it was made, and makes one with a
            database.
        **options: of the keeper of bytes: ``endpoint``, ``region``, ``credentials``, ``timeout``
            and ``retries`` of S3; see ``sapwood.storage.open_keeper``.

    Raises:
        ConfigError: there is no such place, or no such durability.
        StoreError: it cannot be opened.
    """
    promised = None if durability is None else durability_of(durability)
    if isinstance(place, str) and place.startswith(_OBJECTS):
        if shared is False:
            raise ConfigError(f"{place} is shared between machines; shared=False is for folders")
        return _on_objects(open_keeper(place, **options), place, create, promised)
    if place == "memory:":
        _refuse(place, shared, options)
        backend = LocalBackend("memory:", Database(None), open_keeper("memory:"))
        return _opened(backend, backend.keeper, promised)
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        raise ConfigError(
            f"{place!r}: expected a folder, s3://bucket/prefix, mooncake://host:port/prefix, or "
            "memory:"
        )
    _refuse(place, None, options)
    return _in_folder(place, create, promised, shared)


def _in_folder(
    place: str | os.PathLike[str], create: bool, promised: Durability | None, shared: bool | None
) -> Repository:
    keeper = open_keeper(place)
    assert isinstance(keeper, FolderKeeper)
    has_objects = (keeper.folder / MARKER).is_file()
    if shared is not None and shared != has_objects and (has_objects or _has_database(keeper)):
        made = "True, without a database" if has_objects else "False, with a database"
        raise ConfigError(
            f"{keeper.folder} was made with shared={made}; open it as it is, or save the models to "
            "another folder"
        )
    if shared or has_objects:
        reopen = functools.partial(FolderKeeper, keeper.folder)
        return _on_objects(keeper, str(place), create, promised, reopen)
    backend = open_folder(keeper, str(place), create=create)
    return _opened(backend, keeper, promised)


def _has_database(keeper: FolderKeeper) -> bool:
    return is_repository(Path(keeper.folder))


def _on_objects(
    keeper: Keeper,
    name: str,
    create: bool,
    promised: Durability | None,
    reopen: functools.partial[FolderKeeper] | None = None,
) -> Repository:
    try:
        backend = open_objects(keeper, name, create=create, reopen=reopen)
    except BaseException:
        keeper.close()
        raise
    return _opened(backend, keeper, promised)


def _refuse(place: str | os.PathLike[str], shared: bool | None, options: dict[str, Any]) -> None:
    if shared or options:
        given = [*(["shared"] if shared else []), *options]
        raise ConfigError(f"{os.fspath(place)!r} does not take {', '.join(given)}")


def _opened(backend: Backend, keeper: Keeper, promised: Durability | None) -> Repository:
    most = keeper.durability
    if promised is not None and promised > most:
        backend.close()
        raise ConfigError(
            f"{backend.name} can promise {most.name.lower()!r} at most, not "
            f"{promised.name.lower()!r}"
        )
    usual = min(Durability.WRITTEN, most)
    return Repository(backend, durability=usual if promised is None else promised)
