"""Where objects in a bucket are and who asks: a URL, and the variables every S3 tool knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from sapwood.errors import ConfigError, NoRoom, StorageError, Truncated, Unreachable
from sapwood.storage.s3.sigv4 import Credentials

__all__ = ["S3Place", "failure"]


_KINDS: dict[str, type[StorageError]] = {
    "unreachable": Unreachable,
    "InvalidRange": Truncated,
    "InsufficientStorage": NoRoom,
    "QuotaExceeded": NoRoom,
    "XMinioStorageFull": NoRoom,
    "507": NoRoom,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """A bucket, a prefix in it, the server, and how long to wait for it."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""
    endpoint: str
    region: str
    credentials: Credentials
    timeout: float = 60.0
    """Seconds a request may take, of which none moves more than some 16 MiB."""
    retries: int = 3
    """How often a request is tried again, each time after a longer pause."""

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Credentials | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        environment: Mapping[str, str] = os.environ,
    ) -> S3Place:
        """From ``s3://bucket/prefix``; what is not given comes from the environment.

        Raises:
            ConfigError: the URL names no bucket, or there are no credentials.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not an S3 place; expected s3://bucket/prefix")
        if timeout <= 0 or retries < 0:
            raise ConfigError(f"{url}: timeout={timeout}, retries={retries}")
        region = region or _first(environment, "AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
        server = endpoint or _first(environment, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        return cls(
            bucket=parts.netloc,
            prefix=parts.path.strip("/"),
            endpoint=_checked(server or f"https://s3.{region}.amazonaws.com"),
            region=region,
            credentials=credentials or _credentials(url, environment),
            timeout=timeout,
            retries=retries,
        )

    def key(self, name: str) -> str:
        """The full key of an object of this place."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        """As the user wrote it."""
        return f"s3://{self.bucket}/{self.prefix}"


def failure(place: S3Place, doing: str, code: str, detail: str) -> StorageError:
    """The error for what a server answered, or for its silence, with what to do about it."""
    advice = {
        "denied": (
            f"access denied for key {place.credentials.access_key!r}; check AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, and what they may do in bucket {place.bucket!r}"
        ),
        "no bucket": f"there is no bucket {place.bucket!r} at {place.endpoint}; create it first",
        "unreachable": (
            f"{place.endpoint} did not answer in {place.timeout:g} s; check AWS_ENDPOINT_URL, and "
            "that the server runs and can be reached from this node"
        ),
    }
    what = advice.get(code, f"{place.endpoint} answered {code}")
    kind = _KINDS.get(code, StorageError)
    return kind(f"cannot {doing} {place}: {what} ({detail})")


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _checked(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"S3 endpoint is {endpoint!r}, expected http(s)://host:port")
    return endpoint.rstrip("/")


def _credentials(url: str, environment: Mapping[str, str]) -> Credentials:
    access, secret = (
        _first(environment, name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    if not access or not secret:
        raise ConfigError(
            f"no credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
            "AWS_SESSION_TOKEN, if they are lent)"
        )
    return Credentials(
        access_key=access, secret_key=secret, token=_first(environment, "AWS_SESSION_TOKEN")
    )
