"""Who has what: the parts and heads of all providers side by side, version by version."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from sapwood.errors import Unreachable
from sapwood.repository.base import ModelRecord
from sapwood.repository.providers.base import Member, Part, Provider, VersionKey
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import version_of

__all__ = ["HeadCopies", "heads_of", "parts_of"]

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
    answers = links.each(dict.fromkeys(members, lambda provider: provider.models("*")))
    if answers.silent:
        raise all_silent(answers.silent.values())
    found: dict[int, _Found] = {}
    for member, records in answers.got.items():
        for record in records:
            found.setdefault(record.id, _Found(record)).holders.append(member)
    return {id: HeadCopies(one.record, tuple(one.holders)) for id, one in sorted(found.items())}


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
        answers = links.each({member: partial(_page, after=after)})
        if member in answers.silent:
            raise Unreachable(str(answers.silent[member]))
        page = answers.got[member]
        if not page:
            return
        yield from (
            (member, part)
            for part in sorted(page, key=lambda part: (part.version.id, part.version))
        )
        after = max(part.version.id for part in page)


def _page(provider: Provider, after: int) -> Sequence[Part]:
    return provider.parts(after, _PAGE)
