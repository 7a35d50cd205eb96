"""Lists of versions and of models: filtered, sorted, a page at a time."""

from __future__ import annotations

import operator
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sapwood.errors import ConfigError
from sapwood.report.store.plain import brief, number, short, whole
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository

__all__ = ["Listing", "Versions", "list_models", "list_versions", "parse_listing", "wanted"]

_FRESH = 2.0
_PATIENT = 10.0
"""A list that takes long to read is kept so many times as long."""
_PAGE, _MOST = 100, 200
_COLUMNS = 4
_KEY = 100
_COMPARISON = re.compile(r"(.+?)(>=|<=|>|<)([^<>=]+)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_Test = Callable[[ModelRecord], bool]


class Versions:
    """Every version that is there, read anew when it is some seconds old."""

    def __init__(self, repo: Repository) -> None:
        """Nothing is read before it is asked for."""
        self._repo = repo
        self._lock = threading.Lock()
        self._records: tuple[ModelRecord, ...] = ()
        self._until = 0.0

    def all(self) -> tuple[ModelRecord, ...]:
        """By name, oldest first."""
        with self._lock:  # whoever comes while it is read waits, and reads nothing
            began = time.monotonic()
            if began >= self._until:
                self._records = tuple(self._repo.models())
                ended = time.monotonic()
                self._until = ended + max(_FRESH, _PATIENT * (ended - began))
            return self._records

    def forget(self) -> None:
        """Something was changed here."""
        with self._lock:
            self._until = 0.0


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Which part of a list is wanted."""

    words: str = ""
    sort: str = "created"
    """name, created, bytes, tensors, count (of models), or metric: and a name."""
    descending: bool = True
    offset: int = 0
    limit: int = _PAGE


def parse_listing(query: Mapping[str, str]) -> Listing:
    """The list that a request asks for.

    Raises:
        ConfigError: it is not well formed.
    """
    sort = query.get("sort", "created")
    if sort not in _SORTS and not sort.startswith("metric:"):
        raise ConfigError(f"sort is {short(sort, 40)!r}, expected one of {', '.join(_SORTS)}")
    return Listing(
        words=query.get("filter", "")[:1000],
        sort=sort,
        descending=query.get("order", "desc") != "asc",
        offset=whole(query, "offset", 0, least=0, most=10**9),
        limit=whole(query, "limit", _PAGE, least=1, most=_MOST),
    )


def wanted(words: str) -> _Test:
    """What a filter lets through: all of its words must fit.

    ``text`` is a part of the name, version or a tag; ``name:`` and ``tag:`` are exact;
    ``val_acc>0.9`` compares a metric.
    """
    tests = [_test(word) for word in words.split()]
    return lambda record: all(test(record) for test in tests)


def _test(word: str) -> _Test:
    if word.startswith("name:"):
        return lambda record: record.name == word[5:]
    if word.startswith("tag:"):
        return lambda record: word[4:] in record.tags
    found = _COMPARISON.fullmatch(word)
    if found is not None:
        key, sign, text = found.groups()
        try:
            bound = float(text)
        except ValueError:
            raise ConfigError(f"{short(word, 40)!r}: {short(text, 40)!r} is no number") from None
        compare = _OPERATORS[sign]
        return lambda record: key in record.metrics and compare(record.metrics[key], bound)
    part = word.casefold()
    return lambda record: (
        part in str(record.reference).casefold()
        or any(part in tag.casefold() for tag in record.tags)
    )


_SORTS: dict[str, Callable[[ModelRecord], Any]] = {
    "name": lambda record: (record.name, record.id),
    "created": lambda record: record.created,
    "bytes": lambda record: record.nbytes,
    "tensors": lambda record: record.tensors,
    "count": lambda record: 0,
}


def _sorted(records: Sequence[ModelRecord], listing: Listing) -> list[ModelRecord]:
    newest = sorted(records, key=lambda record: record.id, reverse=listing.descending)
    if not listing.sort.startswith("metric:"):
        return sorted(newest, key=_SORTS[listing.sort], reverse=listing.descending)
    key = listing.sort.removeprefix("metric:")
    there = [record for record in newest if key in record.metrics]
    there.sort(key=lambda record: record.metrics[key], reverse=listing.descending)
    return there + [record for record in newest if key not in record.metrics]


def list_versions(records: Sequence[ModelRecord], listing: Listing) -> dict[str, Any]:
    """A page of versions."""
    found = _sorted(list(filter(wanted(listing.words), records)), listing)
    columns = _columns(found, listing.sort)
    page = found[listing.offset : listing.offset + listing.limit]
    rows = [{**brief(one), "metrics": _metrics(one, columns)} for one in page]
    return {
        "total": len(found),
        "all": len(records),
        "offset": listing.offset,
        "columns": columns,
        "rows": rows,
    }


def list_models(records: Sequence[ModelRecord], listing: Listing) -> dict[str, Any]:
    """A page of models: each with its latest version and how many there are."""
    fitting = list(filter(wanted(listing.words), records))
    by_name = sorted(fitting, key=lambda record: (record.name, record.id))
    groups = [list(group) for _, group in groupby(by_name, key=lambda record: record.name)]
    counts = {group[-1].id: len(group) for group in groups}
    latest = _sorted([group[-1] for group in groups], listing)
    if listing.sort == "count":
        latest.sort(key=lambda record: counts[record.id], reverse=listing.descending)
    columns = _columns(latest, listing.sort)
    page = latest[listing.offset : listing.offset + listing.limit]
    rows = [
        {**brief(one), "metrics": _metrics(one, columns), "count": counts[one.id]} for one in page
    ]
    return {
        "total": len(latest),
        "all": len({record.name for record in records}),
        "offset": listing.offset,
        "columns": columns,
        "rows": rows,
    }


def _columns(records: Sequence[ModelRecord], sort: str) -> list[str]:
    """The metrics that most versions have; the one they are sorted by among them."""
    counts = Counter(key for one in records for key in one.metrics if len(key) <= _KEY)
    found = [key for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    chosen = found[:_COLUMNS]
    key = sort.removeprefix("metric:")
    if key != sort and key in counts and key not in chosen:
        chosen[-1] = key
    return chosen


def _metrics(record: ModelRecord, columns: Sequence[str]) -> list[float | str | None]:
    return [number(record.metrics[key]) if key in record.metrics else None for key in columns]
