"""The words of a search, and what sizes, dates and times in it stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from sapwood.errors import ConfigError

__all__ = ["MOST", "Word", "parse_date", "parse_number", "parse_size", "split"]

MOST = 4000
"""Characters of an expression; nobody writes more, and a program should ask in parts."""
_WORD = re.compile(
    r"\s*(?:(?P<op><=|>=|!=|==|=|<|>|~)|(?P<paren>[()])"
    r"|'(?P<single>[^']*)'|\"(?P<double>[^\"]*)\""
    r"|(?P<word>[^\s()<>=!~'\"]+))"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Word:
    """One word of an expression."""

    kind: str
    """``op``, ``paren``, ``word``, or ``quoted``."""
    text: str
    at: int
    """Where it begins."""


def split(text: str) -> list[Word]:
    """The words of an expression.

    Raises:
        ConfigError: it is too long, or something in it is no word.
    """
    if len(text) > MOST:
        raise ConfigError(f"an expression of {len(text)} characters, expected at most {MOST}")
    found, at = [], 0
    while text[at:].strip():
        match = _WORD.match(text, at)
        if match is None:
            rest = text[at:].lstrip()
            what = "a quote that is not closed" if rest[0] in "'\"" else f"{rest[0]!r}"
            begin = len(text) - len(rest) + 1
            raise ConfigError(f"{text!r} cannot be read: {what} at character {begin}")
        kind = str(match.lastgroup)
        quoted = kind in ("single", "double")
        found.append(Word("quoted" if quoted else kind, match[kind], match.start(kind)))
        at = match.end()
    return found


def parse_size(text: str) -> int:
    """The bytes that a text such as 500MB, 1.5GB, 2GiB or 4096 stands for.

    Raises:
        ConfigError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{text!r} is no size, expected one such as 500MB, 1.5GB, 2GiB or 4096")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def parse_number(text: str) -> float:
    """A number.

    Raises:
        ConfigError: it is none, or not a number (NaN), to which nothing compares.
    """
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number:
        raise ConfigError(f"{text!r} is no number")
    return number


def parse_date(text: str) -> float:
    """Seconds since the epoch of a date; without a zone it is local.

    Raises:
        ConfigError: it is no date.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{text!r} is no date, expected one such as 2026-11-19 or 2026-11-19T14:30"
        ) from None
