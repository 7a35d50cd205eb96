"""Who has what: the parts and heads of all providers side by side, version by version."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

from sapwood.repository.base import ModelRecord
from sapwood.repository.providers.base import Member, Part, Provider, VersionKey
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import version_of

__all__ = ["HeadCopies", "all_models", "heads_of", "parts_of", "removed_of"]

T = TypeVar("T")

_PAGE = 500


@dataclass(frozen=True)
class HeadCopies:
    """A version, and the providers that have its head."""

    record: ModelRecord
    holders: tuple[Member, ...]

    @property
    def version(self) -> VersionKey:
        """What providers call it."""
        return version_of(self.record)


@dataclass
class _Found:
    record: ModelRecord
    holders: list[Member] = field(default_factory=list)


def heads_of(links: Links, members: Sequence[Member]) -> dict[int, HeadCopies]:
    """All heads of these providers, by number.

    Raises:
        Unreachable: one does not answer.
    """
    answers = links.each(dict.fromkeys(members, all_models))
    if answers.silent:
        raise all_silent(answers.silent.values())
    found: dict[int, _Found] = {}
    for member, records in answers.got.items():
        for record in records:
            found.setdefault(record.id, _Found(record)).holders.append(member)
    return {id: HeadCopies(one.record, tuple(one.holders)) for id, one in sorted(found.items())}


def all_models(provider: Provider) -> Sequence[ModelRecord]:
    """Every version that a provider has, also those whose names lists leave out by default."""
    found = [*provider.models("*"), *provider.models(".*")]
    return list({record.id: record for record in found}.values())


def removed_of(
    links: Links, members: Sequence[Member]
) -> dict[int, tuple[ModelRecord, frozenset[Member]]]:
    """Versions that were removed, by number, and who remembers that.

    Raises:
        Unreachable: a provider does not answer.
    """
    found: dict[int, tuple[ModelRecord, frozenset[Member]]] = {}
    for member in members:
        after = 0
        while page := _asked(links, member, partial(_removed_page, after=after)):
            for record in page:
                _, known = found.get(record.id, (record, frozenset()))
                found[record.id] = record, known | {member}
            after = max(record.id for record in page)
    return found


def parts_of(
    links: Links, members: Sequence[Member]
) -> Iterator[tuple[VersionKey, dict[Member, Part]]]:
    """The parts of these providers, by number of version; a page of each is in memory.

    Raises:
        Unreachable: one does not answer.
    """
    streams = [_pages(links, member) for member in members]
    for _, some in groupby(heapq.merge(*streams, key=_place), key=_place):
        found = dict(some)
        yield next(iter(found.values())).version, found


def _place(one: tuple[Member, Part]) -> tuple[int, VersionKey]:
    version = one[1].version
    return version.id, version


def _pages(links: Links, member: Member) -> Iterator[tuple[Member, Part]]:
    after = 0
    while True:
        page = _asked(links, member, partial(_page, after=after))
        if not page:
            return
        yield from (
            (member, part)
            for part in sorted(page, key=lambda part: (part.version.id, part.version))
        )
        after = max(part.version.id for part in page)


def _asked(links: Links, member: Member, call: Callable[[Provider], T]) -> T:
    answers = links.each({member: call})
    if answers.silent:
        raise all_silent(answers.silent.values())
    return answers.got[member]


def _removed_page(provider: Provider, after: int) -> Sequence[ModelRecord]:
    return provider.removed(after, _PAGE)


def _page(provider: Provider, after: int) -> Sequence[Part]:
    return provider.parts(after, _PAGE)
