"""Where a Mooncake cluster is: a URL, and options."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from sapwood.errors import BadKey, ConfigError, Unreachable
from sapwood.storage.keys import checked_key

__all__ = ["MooncakePlace"]

_RPC, _METRICS = 50051, 9003
_PROTOCOLS = ("tcp", "rdma")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakePlace:
    """A master, and a prefix of keys on it."""

    host: str
    port: int = _RPC
    metrics: int = _METRICS
    """The port of the master's HTTP server, which lists keys."""
    prefix: str = ""
    local: str
    """The address by which other clients reach this process."""
    protocol: str = "tcp"
    device: str = ""
    """Names of RDMA devices."""
    segment: int = 0
    """Bytes of memory that this process gives to the cluster as long as it lives."""
    replicas: int = 1
    timeout: float = 30.0

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        local: str | None = None,
        protocol: str | None = None,
        device: str | None = None,
        segment: int = 0,
        replicas: int = 1,
        timeout: float = 30.0,
    ) -> MooncakePlace:
        """From ``mooncake://host:port/prefix?metrics=9003``.

        Raises:
            ConfigError: the URL names no master, or an option makes no sense.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        metrics, prefix = query.pop("metrics", str(_METRICS)), parts.path.strip("/")
        try:
            port = parts.port or _RPC
        except ValueError:
            port = 0
        good = parts.scheme == "mooncake" and parts.hostname and port and not parts.fragment
        if not good or query or not metrics.isdecimal() or parts.username is not None:
            raise ConfigError(
                f"{url!r} is not a Mooncake place; expected "
                "mooncake://host:port/prefix?metrics=9003, the port of the master and the one of "
                "its HTTP server"
            )
        try:
            _ = prefix and checked_key(prefix)
        except BadKey as error:
            raise ConfigError(f"{url!r}: {error}") from None
        protocol = protocol or os.environ.get("SAPWOOD_MOONCAKE_PROTOCOL") or "tcp"
        if protocol not in _PROTOCOLS or segment < 0 or replicas < 1 or not 0 < timeout < math.inf:
            raise ConfigError(
                f"{url}: protocol={protocol!r} (tcp or rdma), segment={segment}, "
                f"replicas={replicas}, timeout={timeout}"
            )
        host = parts.hostname or ""
        return cls(
            host=host,
            port=port,
            metrics=int(metrics),
            prefix=prefix,
            local=local or _address_towards(host, port),
            protocol=protocol,
            device=device or os.environ.get("SAPWOOD_MOONCAKE_DEVICE", ""),
            segment=segment,
            replicas=replicas,
            timeout=timeout,
        )

    @property
    def master(self) -> str:
        """``host:port`` of the master."""
        return f"{self.host}:{self.port}"

    def key(self, name: str) -> str:
        """The full key of an object of this place."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def check_master(self) -> None:
        """See that somebody listens there: a client would try for minutes.

        Raises:
            Unreachable: nobody does.
        """
        for port, what in ((self.port, "master"), (self.metrics, "HTTP server of the master")):
            try:
                socket.create_connection((self.host, port), min(self.timeout, 5.0)).close()
            except OSError as error:
                why = error.strerror or str(error)
                raise Unreachable(
                    f"no {what} of Mooncake answers at {self.host}:{port}: {why}; start "
                    "mooncake_master, or correct the URL"
                ) from error

    def __str__(self) -> str:
        """As the user wrote it."""
        return f"mooncake://{self.master}/{self.prefix}"


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
