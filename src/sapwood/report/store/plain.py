"""What is sent to the page: JSON that a browser reads, and never much of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from sapwood.errors import ConfigError
from sapwood.repository.base import ModelRecord

__all__ = ["Json", "brief", "line", "number", "short", "whole"]

_TEXT = 300
_TAGS = 20


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return line(content)


def line(content: Any) -> bytes:
    """JSON as bytes of ASCII: names of tensors may hold halves of characters, UTF-8 may not."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def number(value: float) -> float | str:
    """A number; what JSON has no word for goes as text."""
    return value if math.isfinite(value) else repr(float(value))


def short(text: str, limit: int = _TEXT) -> str:
    """Text of somebody else's, no longer than a page can show."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def brief(record: ModelRecord) -> dict[str, Any]:
    """A version as lists show it. Its number is text: JavaScript's numbers have only 53 bits."""
    return {
        "id": str(record.id),
        "name": record.name,
        "version": record.version,
        "ref": str(record.reference),
        "created": record.created,
        "removed": record.removed,
        "bytes": record.nbytes,
        "tensors": record.tensors,
        "tags": list(record.tags[:_TAGS]),
        "more_tags": max(0, len(record.tags) - _TAGS),
    }


def whole(query: Mapping[str, str], key: str, default: int, *, least: int, most: int) -> int:
    """A whole number of a request.

    Raises:
        ConfigError: it is none, or out of bounds.
    """
    text = query.get(key, str(default))
    found = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
    if not least <= found <= most:
        raise ConfigError(f"{key} is {short(text, 40)!r}, expected a number of {least} to {most}")
    return found
