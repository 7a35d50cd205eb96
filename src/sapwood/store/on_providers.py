"""Opening a repository that providers keep: where they are, and the token they want."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.errors import ConfigError
from sapwood.storage import Durability

if TYPE_CHECKING:
    from sapwood.repository.base import Backend
    from sapwood.repository.providers.cluster_opening import ClusterSettings

__all__ = ["SCHEME", "TLS_CA", "TOKEN", "TOKEN_FILE", "open_on_providers", "settings_of"]

SCHEME = "sapwood://"
TOKEN, TOKEN_FILE = "SAPWOOD_STORE_TOKEN", "SAPWOOD_STORE_TOKEN_FILE"
TLS_CA = "SAPWOOD_STORE_TLS_CA"


def open_on_providers(
    place: str, settings: ClusterSettings
) -> tuple[Backend, Durability, Durability]:
    """The back end, the most that it can promise, and the most of one provider alone.

    Raises:
        ConfigError: an address is wrong.
        Unreachable: none of the providers that were named answers.
    """
    from sapwood.repository.providers.cluster_opening import open_cluster

    backend, most = open_cluster(place, settings)
    alone = min(most, Durability.SYNCED)
    return backend, Durability.REPLICATED if backend.members.replicas > 1 else alone, alone


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
    from sapwood.runtime.tokens import read_token

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
