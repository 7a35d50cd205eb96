"""What a search asks of a version."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sapwood.repository.base import ModelRecord

__all__ = ["OPERATORS", "AllOf", "AnyOf", "Has", "Metric", "Not", "Number", "Term", "Text"]

Compare = Callable[[float, float], bool]
OPERATORS: dict[str, Compare] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


class Term(Protocol):
    """Something that a version fits or not."""

    def fits(self, record: ModelRecord) -> bool:
        """Whether a version does."""
        ...

    def metrics(self) -> Iterator[str]:
        """The metrics that are asked for."""
        ...


class _WithoutMetrics:
    def metrics(self) -> Iterator[str]:
        """None."""
        return iter(())


@dataclass(frozen=True)
class AllOf:
    """Every one of several terms."""

    terms: Sequence[Term]

    def fits(self, record: ModelRecord) -> bool:
        """Whether all do."""
        return all(term.fits(record) for term in self.terms)

    def metrics(self) -> Iterator[str]:
        """Those of all."""
        return (name for term in self.terms for name in term.metrics())


@dataclass(frozen=True)
class AnyOf:
    """At least one of several terms."""

    terms: Sequence[Term]

    def fits(self, record: ModelRecord) -> bool:
        """Whether any does."""
        return any(term.fits(record) for term in self.terms)

    def metrics(self) -> Iterator[str]:
        """Those of all."""
        return (name for term in self.terms for name in term.metrics())


@dataclass(frozen=True)
class Not:
    """The opposite of a term."""

    term: Term

    def fits(self, record: ModelRecord) -> bool:
        """Whether the term does not."""
        return not self.term.fits(record)

    def metrics(self) -> Iterator[str]:
        """Those of the term."""
        return self.term.metrics()


@dataclass(frozen=True)
class Has:
    """Whether a version has a metric."""

    name: str

    def fits(self, record: ModelRecord) -> bool:
        """Whether it was saved with it."""
        return self.name in record.metrics

    def metrics(self) -> Iterator[str]:
        """This one."""
        return iter((self.name,))


@dataclass(frozen=True)
class Metric:
    """A metric compared with a number; a version without it does not fit."""

    name: str
    compare: Compare
    value: float

    def fits(self, record: ModelRecord) -> bool:
        """Whether it has the metric, and that fits."""
        found = record.metrics.get(self.name)
        return found is not None and self.compare(found, self.value)

    def metrics(self) -> Iterator[str]:
        """This one."""
        return iter((self.name,))


@dataclass(frozen=True)
class Number(_WithoutMetrics):
    """Something every version has, compared with a number."""

    of: Callable[[ModelRecord], float]
    compare: Compare
    value: float

    def fits(self, record: ModelRecord) -> bool:
        """Whether it does."""
        return self.compare(self.of(record), self.value)


@dataclass(frozen=True)
class Text(_WithoutMetrics):
    """Words of a version, of which one must fit: its name, its version, or any of its tags."""

    of: Callable[[ModelRecord], Sequence[str]]
    accept: Callable[[str], bool]

    def fits(self, record: ModelRecord) -> bool:
        """Whether any word is accepted."""
        return any(map(self.accept, self.of(record)))
