"""Opening a repository that providers keep: where they are, and the token they want."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sapwood.errors import ConfigError
from sapwood.storage import Durability

if TYPE_CHECKING:
    from sapwood.repository.base import Backend

__all__ = ["SCHEME", "TOKEN", "TOKEN_FILE", "open_on_providers", "token_of"]

SCHEME = "sapwood://"
TOKEN, TOKEN_FILE = "SAPWOOD_STORE_TOKEN", "SAPWOOD_STORE_TOKEN_FILE"


def open_on_providers(
    place: str,
    *,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    local: bool | None = None,
    staging: str = "preallocated",
    timeout: float = 30.0,
) -> tuple[Backend, Durability, Durability]:
    """The back end, the most that it can promise, and the most of one provider alone.

    Raises:
        ConfigError: an address or a token is wrong.
        Unreachable: none of the providers that were named answers.
    """
    from sapwood.repository.providers.cluster_opening import ClusterSettings, open_cluster

    settings = ClusterSettings(
        token=token_of(token),
        tls_ca=None if tls_ca is None else Path(tls_ca),
        local=local,
        timeout=timeout,
        staging=staging,
    )
    backend, most = open_cluster(place, settings)
    alone = min(most, Durability.SYNCED)
    return backend, Durability.REPLICATED if backend.members.replicas > 1 else alone, alone


def token_of(token: str | None) -> str:
    """A token that was given, or the environment's.

    Raises:
        ConfigError: there is none.
    """
    from sapwood.repository.providers.rights import read_token

    if token is None:
        token = os.environ.get(TOKEN)
    if not token and (file := os.environ.get(TOKEN_FILE)):
        token = read_token(Path(file))
    if not token:
        raise ConfigError(
            f"providers want a token: give token=, or set {TOKEN}, or {TOKEN_FILE} to the file "
            "that `sapwood store serve` named"
        )
    return token
