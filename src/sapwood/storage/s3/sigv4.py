"""Signing a request to S3 with AWS Signature Version 4, in the header.

Only what ``multipart`` needs: obstore signs its own requests, but cannot name the parts of a
multipart upload.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

__all__ = ["Credentials", "encoded_path", "encoded_query", "payload_hash", "signed"]

_ALGORITHM = "AWS4-HMAC-SHA256"
Query = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who asks."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    """Of a session that was lent for some time."""


def encoded_path(path: str) -> str:
    """A path as it is sent and signed: S3 encodes it once, and slashes not at all."""
    return quote(path, safe="/-_.~")


def encoded_query(query: Query) -> str:
    """A query as it is sent and signed, in the order the signature wants."""
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query)
    return "&".join(f"{k}={v}" for k, v in pairs)


def payload_hash(body: Any) -> str:
    """What is signed in place of the body, which protects it on the way as well."""
    return hashlib.sha256(body).hexdigest()


def signed(
    *,
    method: str,
    host: str,
    path: str,
    query: Query = (),
    headers: Mapping[str, str],
    body_hash: str,
    credentials: Credentials,
    region: str,
    now: datetime | None = None,
) -> dict[str, str]:
    """The headers to send: those given, and the signature of the whole request."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    sent = {**headers, "host": host, "x-amz-date": moment, "x-amz-content-sha256": body_hash}
    if credentials.token:
        sent["x-amz-security-token"] = credentials.token
    lines = sorted((name.lower(), " ".join(value.split())) for name, value in sent.items())
    names = ";".join(name for name, _ in lines)
    request = "\n".join(
        [
            method,
            encoded_path(path),
            encoded_query(query),
            *(f"{name}:{value}" for name, value in lines),
            "",
            names,
            body_hash,
        ]
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join([_ALGORITHM, moment, scope, digest])
    mark = hmac.new(_key(credentials, moment[:8], region), text.encode(), hashlib.sha256)
    sent["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope},"
        f"SignedHeaders={names},Signature={mark.hexdigest()}"
    )
    return sent


def _key(credentials: Credentials, day: str, region: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for word in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    return key
