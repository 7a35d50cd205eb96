"""Lengths of time as people write them: 90, "90s", "10min", "3h55m"."""

from __future__ import annotations

import math
import numbers
import re

from sapwood.errors import ConfigError

__all__ = ["parse_seconds", "show_seconds"]

_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s|)\s*")


def parse_seconds(value: float | str, what: str) -> float:
    """The seconds a number or a text such as "90s", "10min", "1h" or "3h55m" stands for.

    Raises:
        ConfigError: it is written otherwise, or is not a length of time; ``what`` names it.
    """
    found = _number(value) if not isinstance(value, str) else _text(value.strip().lower())
    if found is None or not 0 <= found < math.inf:
        raise ConfigError(
            f'{what} is {value!r}, expected seconds or a time such as "90s", "10min" or "3h55m"'
        )
    return found


def _number(value: object) -> float | None:
    whole = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if whole else None  # type: ignore[arg-type]


def _text(text: str) -> float | None:
    parts: list[tuple[str, str]] = _PART.findall(text)
    # What the pattern passed over, or a number without a unit among others, is a mistake.
    if not parts or _PART.sub("", text) or (len(parts) > 1 and any(not u for _, u in parts)):
        return None
    sizes = [_UNITS[unit] for _, unit in parts]
    if sorted(set(sizes), reverse=True) != sizes:
        return None  # "5m1h" or "1h1h" is more likely a slip than a sum
    return sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))


def show_seconds(seconds: float) -> str:
    """A length of time as a user would write it."""
    if seconds < 60 or seconds != int(seconds):
        return f"{seconds:g}s"
    text, left = "", int(seconds)
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_UNITS[unit]))
        text += f"{count}{unit}" if count else ""
    return text
