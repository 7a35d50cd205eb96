"""Opening a repository, by path or URL."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
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
from sapwood.store.on_providers import SCHEME, open_on_providers, settings_of
from sapwood.store.repository import Repository, durability_of

__all__ = ["open"]

_OBJECTS = ("s3://", "mooncake://")


def open(
    place: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability | str | None = None,
    shared: bool | None = None,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    local: bool | None = None,
    staging: str | None = None,
    **options: Any,
) -> Repository:
    """Open a repository, or make it.

    Args:
        place: a folder; ``sapwood://host:port`` for providers, of which one or more are named,
            with a comma between; ``s3://bucket/prefix``; ``mooncake://host:port/prefix``; or
            ``memory:`` for one that ends with this process.
        create: whether to make it where there is none.
        durability: what ``save`` promises unless it is told otherwise: ``"memory"``, ``"written"``
            (survives every process; the default), ``"synced"`` (survives a power cut),
            ``"replicated"`` (survives the loss of a machine).
        shared: for a folder on a network file system that several machines write to: it has no
            database, and nothing is mapped. None takes it as it was made, and makes one with a
            database.
        token: of providers; by default what SAPWOOD_STORE_TOKEN says, or the file that
            SAPWOOD_STORE_TOKEN_FILE names.
        tls_ca: the certificate that signed the providers', if they use TLS; by default what
            SAPWOOD_STORE_TLS_CA names.
        local: whether to pass memory to providers on this machine; by default where there are any.
        staging: ``"preallocated"``, the default, keeps memory for the next save to a provider on
            this machine, ``"on_demand"`` does not.
        **options: ``timeout`` of providers, in seconds without a sign of life; of S3 ``endpoint``,
            ``region``, ``credentials``, ``timeout`` and ``retries``, see
            ``sapwood.storage.open_keeper``.

    Raises:
        ConfigError: there is no such place, or no such durability.
        StoreError: it cannot be opened.
        Unreachable: none of the providers that were named answers.
    """
    promised = None if durability is None else durability_of(durability)
    of_providers = {"token": token, "tls_ca": tls_ca, "local": local, "staging": staging}
    given: dict[str, Any] = {key: value for key, value in of_providers.items() if value is not None}
    if isinstance(place, str) and place.startswith(SCHEME):
        _refuse(place, {**_only(shared=shared), **_beyond(options, "timeout")})
        backend, most, alone = open_on_providers(place, settings_of(**given, **options))
        return _opened(backend, most, promised, usual=alone)
    _refuse(place, given)
    if isinstance(place, str) and place.startswith(_OBJECTS):
        if shared is False:
            raise ConfigError(f"{place} is shared between machines; shared=False is for folders")
        return _on_objects(open_keeper(place, **options), place, create, promised)
    if place == "memory:":
        _refuse(place, {**_only(shared=shared), **options})
        backend = LocalBackend("memory:", Database(None), open_keeper("memory:"))
        return _opened(backend, backend.keeper.durability, promised)
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        raise ConfigError(
            f"{place!r}: expected a folder, {SCHEME}host:port, s3://bucket/prefix, "
            "mooncake://host:port/prefix, or memory:"
        )
    _refuse(place, options)
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
    return _opened(backend, keeper.durability, promised)


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
    return _opened(backend, keeper.durability, promised)


def _only(**given: Any) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value}


def _beyond(given: Mapping[str, Any], *known: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in known}


def _refuse(place: str | os.PathLike[str], given: Mapping[str, Any]) -> None:
    if given:
        named = ", ".join(f"{key}=" for key in given)
        raise ConfigError(f"{os.fspath(place)!r} does not take {named}")


def _opened(
    backend: Backend,
    most: Durability,
    promised: Durability | None,
    usual: Durability = Durability.WRITTEN,
) -> Repository:
    if promised is not None and promised > most:
        name = backend.name
        backend.close()
        raise ConfigError(
            f"{name} can promise {most.name.lower()!r} at most, not {promised.name.lower()!r}"
        )
    if promised is None:
        promised = min(Durability.WRITTEN, usual, most)
    return Repository(backend, durability=promised)
