"""Asking a hub's server over plain HTTP."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """One request; ``__`` in a header's name is a hyphen."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        named = {name.replace("__", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, named)
        found = connection.getresponse()
        lower = {name.lower(): value for name, value in found.getheaders()}
        return Answer(found.status, lower, found.read())
    finally:
        connection.close()
