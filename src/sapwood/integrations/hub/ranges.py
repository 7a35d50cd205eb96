"""Which bytes of a file a Range header asks for."""

from __future__ import annotations

import re
from itertools import pairwise

__all__ = ["MOST", "Unsatisfiable", "parse_ranges"]

MOST = 64
"""Ranges of one request; more of them cost a server more than they help a client."""
_ONE = re.compile(r"\s*(\d{0,19})-(\d{0,19})\s*", re.ASCII)


class Unsatisfiable(Exception):
    """None of the ranges has a byte of the file, or there are too many."""


def parse_ranges(header: str | None, size: int) -> list[tuple[int, int]] | None:
    """Start and end of each range, in the order asked for; None where the whole file is meant.

    A header that is not well formed means the whole file, as RFC 9110 has it. Ranges that overlap
    become one, so that no request makes more bytes than the file has.

    Raises:
        Unsatisfiable: no range has a byte of the file, or there are more than ``MOST``.
    """
    if header is None:
        return None
    unit, equals, text = header.partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    asked = [one for one in text.split(",") if one.strip()]
    matches = [_ONE.fullmatch(one) for one in asked]
    pairs = [(m[1], m[2]) for m in matches if m is not None]
    if not pairs or len(pairs) < len(matches) or any(not a and not b for a, b in pairs):
        return None
    if any(a and b and int(b) < int(a) for a, b in pairs):
        return None
    if len(pairs) > MOST:
        raise Unsatisfiable
    found = [_bounds(a, b, size) for a, b in pairs]
    real = [(start, stop) for start, stop in found if start < stop]
    if not real:
        raise Unsatisfiable
    return _apart(real)


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    if not first:  # the last bytes of the file
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def _apart(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ordered = sorted(ranges)
    if all(one[1] <= next_[0] for one, next_ in pairwise(ordered)):
        return ranges
    merged = [ordered[0]]
    for start, stop in ordered[1:]:
        if start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
