"""Going through the versions of a repository."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood.errors import ConfigError
from sapwood.repository.base import ModelRecord
from sapwood.repository.names import nearest
from sapwood.store.finding.parser import parse_expression

__all__ = ["ordered", "search"]


def search(records: Sequence[ModelRecord], expression: str) -> list[ModelRecord]:
    """Those that an expression fits, in their order.

    Raises:
        ConfigError: it cannot be read, or is about a metric that none of them has.
    """
    term = parse_expression(expression)
    if not records:
        return []
    for name in term.metrics():
        _check(records, name)
    return [record for record in records if term.fits(record)]


def ordered(records: Sequence[ModelRecord], by: str, *, lower: bool) -> list[ModelRecord]:
    """The best by a metric first, the newest of equals first; those without it are last."""

    def place(record: ModelRecord) -> tuple[bool, float, float]:
        value = record.metrics.get(by)
        if value is None:
            return True, 0.0, -record.created
        return False, value if lower else -value, -record.created

    if records:
        _check(records, by)
    return sorted(records, key=place)


def _check(records: Sequence[ModelRecord], name: str) -> None:
    known: set[str] = set()
    for record in records:
        if name in record.metrics:
            return
        known.update(record.metrics)
    have = f"there are {', '.join(sorted(known)[:20])}" if known else "none has any metric"
    raise ConfigError(f"no version has the metric {name!r}{nearest(name, known)} ({have})")
