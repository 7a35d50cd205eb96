"""Opening a repository, by path or URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.errors import ConfigError
from sapwood.repository.database import Database
from sapwood.repository.folder import open_folder
from sapwood.repository.local import LocalBackend
from sapwood.storage import Durability, open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.store.repository import Repository, durability_of

if TYPE_CHECKING:
    from sapwood.repository.base import Backend
    from sapwood.repository.providers.cluster_opening import ClusterSettings

__all__ = ["TLS_CA", "TOKEN", "TOKEN_FILE", "open", "settings_of"]

SCHEME = "sapwood://"
TOKEN, TOKEN_FILE = "SAPWOOD_STORE_TOKEN", "SAPWOOD_STORE_TOKEN_FILE"
TLS_CA = "SAPWOOD_STORE_TLS_CA"


def open(
    place: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability | str | None = None,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    local: bool | None = None,
    timeout: float = 30.0,
    staging: str = "preallocated",
) -> Repository:
    """Open a repository, or make it.

    Args:
        place: a folder; ``sapwood://host:port`` for providers, of which one or more are named,
            with a comma between; or ``memory:`` for one that ends with this process.
        create: whether to make it where there is none.
        durability: what ``save`` promises unless it is told otherwise: ``"memory"``, ``"written"``
            (survives every process; the default), ``"synced"`` (survives a power cut),
            ``"replicated"`` (survives the loss of a provider).
        token: of providers; by default what SAPWOOD_STORE_TOKEN says, or the file that
            SAPWOOD_STORE_TOKEN_FILE names.
        tls_ca: the certificate that signed the providers', if they use TLS; by default what
            SAPWOOD_STORE_TLS_CA names.
        local: whether to pass memory to providers on this machine; by default where there are any.
        timeout: seconds without a sign of life after which a provider counts as silent.
        staging: ``"preallocated"`` keeps memory for the next save to a provider on this machine,
            ``"on_demand"`` does not.

    Raises:
        ConfigError: there is no such place, or no such durability.
        StoreError: it cannot be opened.
        Unreachable: none of the providers that were named answers.
    """
    promised = None if durability is None else durability_of(durability)
    if isinstance(place, str) and place.startswith(SCHEME):
        settings = settings_of(token, tls_ca, local=local, timeout=timeout, staging=staging)
        return _providers(place, promised, settings)
    if token is not None or tls_ca is not None or local is not None:
        raise ConfigError(f"token=, tls_ca= and local= are for {SCHEME}host:port, not for {place}")
    if place == "memory:":
        backend = LocalBackend("memory:", Database(None), open_keeper("memory:"))
        return _opened(backend, backend.keeper.durability, promised)
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        raise ConfigError(f"{place!r}: expected a folder, {SCHEME}host:port, or memory:")
    keeper = open_keeper(place)
    assert isinstance(keeper, FolderKeeper)
    backend = open_folder(keeper, str(place), create=create)
    return _opened(backend, keeper.durability, promised)


def settings_of(
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    **more: Any,
) -> ClusterSettings:
    """How to reach providers, with what the environment says of token and certificate.

    Raises:
        ConfigError: there is no token.
    """
    from sapwood.repository.providers.cluster_opening import ClusterSettings
    from sapwood.repository.providers.rights import read_token

    token = os.environ.get(TOKEN) if token is None else token
    if not token and (file := os.environ.get(TOKEN_FILE)):
        token = read_token(Path(file))
    if not token:
        raise ConfigError(
            f"providers want a token: give token=, or set {TOKEN}, or {TOKEN_FILE} to the file "
            "that `sapwood store serve` named"
        )
    authority = tls_ca or os.environ.get(TLS_CA) or None
    return ClusterSettings(
        token=token, tls_ca=None if authority is None else Path(authority), **more
    )


def _providers(place: str, promised: Durability | None, settings: ClusterSettings) -> Repository:
    from sapwood.repository.providers.cluster_opening import open_cluster

    backend, most = open_cluster(place, settings)
    if backend.members.replicas > 1:
        return _opened(backend, Durability.REPLICATED, promised, usual=min(most, _USUAL))
    return _opened(backend, min(most, Durability.SYNCED), promised)


_USUAL = Durability.WRITTEN


def _opened(
    backend: Backend,
    most: Durability,
    promised: Durability | None,
    usual: Durability = _USUAL,
) -> Repository:
    if promised is not None and promised > most:
        name = backend.name
        backend.close()
        raise ConfigError(
            f"{name} can promise {most.name.lower()!r} at most, not {promised.name.lower()!r}"
        )
    return Repository(backend, durability=min(usual, most) if promised is None else promised)
