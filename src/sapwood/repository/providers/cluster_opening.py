"""Reaching a cluster: ``sapwood://host:port,host2:port``."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapwood.channel.tls import client_context
from sapwood.errors import ConfigError, Unreachable
from sapwood.repository.providers.base import Member, Members
from sapwood.repository.providers.cluster import ClusterBackend
from sapwood.repository.providers.cluster_links import all_silent
from sapwood.repository.providers.link import split_address
from sapwood.repository.providers.remote import RemoteProvider
from sapwood.storage import Durability

__all__ = ["SCHEME", "ClusterSettings", "open_cluster"]

SCHEME = "sapwood://"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How a client reaches providers."""

    token: str
    """Decides what it may do; all providers must know it."""
    tls_ca: Path | None = None
    """The certificate that signed the providers'; without it nothing is encrypted."""
    local: bool | None = None
    """Whether memory is passed to providers on this machine; None where there are any."""
    timeout: float = 30.0
    """Seconds without a sign of life after which a provider counts as silent."""
    staging: str = "preallocated"
    """``preallocated`` keeps memory for the next save ready, ``on_demand`` does not."""


def open_cluster(place: str, settings: ClusterSettings) -> tuple[ClusterBackend, Durability]:
    """The client of a cluster, and the most that its providers can promise by themselves.

    The addresses are of any of its providers: the first that answers tells who all of them are.

    Raises:
        ConfigError: the place is not well formed.
        Denied: a provider does not take the token.
        Unreachable: none of the providers answers.
    """
    addresses = _addresses(place)
    tls = None if settings.tls_ca is None else client_context(settings.tls_ca)
    members, most = _ask(addresses, settings, tls)

    def connect(member: Member, epoch: Callable[[], int]) -> _Client:
        return _Client(member, epoch, settings, tls)

    return ClusterBackend(place, members, connect), most


class _Client(RemoteProvider):
    """The client of one member; its requests carry the epoch that the cluster's client goes by."""

    def __init__(
        self,
        member: Member,
        epoch: Callable[[], int],
        settings: ClusterSettings,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._epoch_now = epoch
        super().__init__(
            member.address,
            settings.token,
            name=member.name,
            timeout=settings.timeout,
            tls=tls,
            local=settings.local,
            staging=settings.staging,
        )

    @property
    def epoch(self) -> int | None:
        return self._epoch_now()

    @epoch.setter
    def epoch(self, _: int | None) -> None:
        """It follows the list."""


def _addresses(place: str) -> Sequence[str]:
    addresses = [one for one in place.removeprefix(SCHEME).rstrip("/").split(",") if one]
    if not addresses:
        raise ConfigError(f"{place!r}: expected {SCHEME}host:port, several with a comma between")
    for address in addresses:
        split_address(address)
    return addresses


def _ask(
    addresses: Sequence[str], settings: ClusterSettings, tls: ssl.SSLContext | None
) -> tuple[Members, Durability]:
    silent = []
    for address in addresses:
        # Without the Unix socket: it is asked once.
        first = RemoteProvider(
            address, settings.token, timeout=settings.timeout, tls=tls, local=False
        )
        try:
            return first.members(), first.durability
        except Unreachable as error:
            silent.append(error)
        finally:
            first.close()
    raise all_silent(silent)
