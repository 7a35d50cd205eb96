"""Names of models: ``path/of/name@version``, where a tag may stand for the version."""

from __future__ import annotations

import difflib
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sapwood.errors import BadName

__all__ = [
    "HIDDEN",
    "Reference",
    "check_file",
    "check_name",
    "check_version",
    "is_hidden",
    "nearest",
    "new_id",
    "next_version",
    "parse",
    "time_of",
]

HIDDEN = "."
"""What names begin with that no user gives: unfinished work, which lists leave out."""
_PART = r"[A-Za-z0-9][A-Za-z0-9._+=-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_VERSION = re.compile(_PART)
_NAME_LENGTH, _VERSION_LENGTH, _FILE_LENGTH = 200, 100, 200
_RANDOM_BITS = 20
"""Below the milliseconds in a version's number, so that two providers do not give the same one."""
_RULE = "letters, digits and '._+=-', each part beginning with a letter or a digit"


@dataclass(frozen=True, order=True)
class Reference:
    """A model, and which version of it; no version means the latest."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        """As a user writes it."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse(text: str) -> Reference:
    """The reference a user wrote.

    Raises:
        BadName: it is none; nothing else was looked at.
    """
    if not isinstance(text, str):
        raise BadName(f"a model is named by text such as 'name@version', not by {text!r}")
    name, at, version = text.partition("@")
    return Reference(check_name(name), check_version(version) if at else None)


def check_name(text: str) -> str:
    """A name without version.

    Raises:
        BadName: it is not well formed.
    """
    if len(text) > _NAME_LENGTH or not _NAME.fullmatch(text):
        raise BadName(
            f"{text!r} is no name of a model: names are parts with '/' between them, of {_RULE}, "
            f"at most {_NAME_LENGTH} characters in all"
        )
    return text


def check_version(text: str) -> str:
    """A version or a tag.

    Raises:
        BadName: it is not well formed.
    """
    if len(text) > _VERSION_LENGTH or not _VERSION.fullmatch(text):
        raise BadName(
            f"{text!r} is no version or tag: they are of {_RULE}, at most {_VERSION_LENGTH} "
            "characters"
        )
    return text


def check_file(text: str) -> str:
    """The name of a file that is kept with a version: a relative path with ``/`` in it.

    Raises:
        BadName: it would not be a path inside a folder, on any system.
    """
    parts = text.split("/") if isinstance(text, str) else [""]
    odd = any(part in ("", ".", "..") for part in parts) or not text.isprintable()
    if odd or len(text.encode("utf-8", "replace")) > _FILE_LENGTH or set(text) & set("\\:"):
        raise BadName(
            f"{text!r} is no name of a file: expected a path inside a folder such as "
            "'config.json', without '..', ':', backslashes and control characters, of at most "
            f"{_FILE_LENGTH} bytes"
        )
    return text


def is_hidden(text: str) -> bool:
    """Whether a name, or a pattern of names, is of what lists leave out."""
    return text.startswith(HIDDEN)


def next_version(taken: Iterable[str]) -> str:
    """The number after the largest one there is."""
    return str(max((int(v) for v in taken if v.isdecimal() and v.isascii()), default=0) + 1)


def new_id(after: int = 0) -> int:
    """A number for a version: 63 bits, larger than ``after``, and larger the later it is given."""
    now = time.time_ns() // 1_000_000
    return max(now << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS), after + 1)


def time_of(id: int) -> float:
    """When a number was given, in seconds since the epoch."""
    return (id >> _RANDOM_BITS) / 1000


def nearest(wanted: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` for what is alike, or nothing."""
    found = difflib.get_close_matches(wanted, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
