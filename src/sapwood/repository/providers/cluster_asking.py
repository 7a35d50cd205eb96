"""Questions to a cluster: names are asked of their homes, the rest of all providers at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from sapwood.errors import Damaged, ModelNotFound
from sapwood.repository.base import Kin, ModelRecord
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Member, Members, Provider
from sapwood.repository.providers.cluster_links import Answers, Links, all_silent
from sapwood.repository.providers.cluster_places import homes, homes_before

__all__ = ["Asking"]

T = TypeVar("T")
_SECONDS = 30.0
"""For a question to all providers."""
_CONFIGS = 10_000
"""Configurations of layers that are kept; they never change."""


class Asking:
    """What is known of heads, whichever providers know it. Keeps configurations it has seen."""

    def __init__(self, links: Links) -> None:
        """``links`` stay the caller's to close."""
        self._links = links
        self._configs: OrderedDict[bytes, bytes] = OrderedDict()

    # -- one version -------------------------------------------------------------------------

    def find(self, reference: Reference) -> ModelRecord:
        """As ``Backend.find``."""
        return self.head(reference, lambda provider: provider.find(reference), lambda one: one)

    def head(
        self,
        reference: Reference,
        ask: Callable[[Provider], T],
        record_of: Callable[[T], ModelRecord],
    ) -> T:
        """What the homes of a model answer; if they differ, the latest version.

        They differ where one of them was away when a version was saved, or a tag moved to it.

        Raises:
            ModelNotFound: no home has it.
            Unreachable: no home answers that could have it.
        """
        return self._links.current(partial(self._head, reference, ask, record_of))

    def _head(
        self,
        reference: Reference,
        ask: Callable[[Provider], T],
        record_of: Callable[[T], ModelRecord],
        members: Members,
    ) -> T:
        groups = [homes(members, reference.name), homes_before(members, reference.name)]
        where = [member for group in groups for member in group]
        where.sort(key=lambda member: self._links.link(member).down)
        found = self._links.each({where[0]: partial(_if_found, ask)})
        if (first := self._whole(found, reference, record_of)) is not None:
            return first
        if len(where) > 1:
            rest = self._links.each(dict.fromkeys(where[1:], partial(_if_found, ask)))
            found = Answers({**found.got, **rest.got}, {**found.silent, **rest.silent})
        there = [answer for answer, _ in found.got.values() if answer is not None]
        if there:
            return max(there, key=lambda answer: record_of(answer).id)
        for group in groups:
            if group and not any(member in found.got for member in group):
                raise all_silent(found.silent.values())
        raise next(error for _, error in found.got.values() if error is not None)

    def _whole(
        self,
        found: Answers[tuple[T | None, ModelNotFound | None]],
        reference: Reference,
        record_of: Callable[[T], ModelRecord],
    ) -> T | None:
        """The first answer, if it is of a version that was named: that one never changes."""
        for answer, _ in found.got.values():
            if answer is not None and record_of(answer).version == reference.version:
                return answer
        return None

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As ``Backend.by_id``; what was removed is with those who had it then."""

        def ask(provider: Provider) -> ModelRecord | None:
            try:
                return provider.by_id(id, name)
            except ModelNotFound:
                return None

        def at_homes(members: Members) -> ModelRecord | None:
            where = (*homes(members, name), *homes_before(members, name))
            return _any_of(self._links.each(dict.fromkeys(where, ask)).got.values())

        def anywhere(_: Members) -> ModelRecord | None:
            return _any_of(self._links.everyone(ask, _SECONDS).got.values())

        found = self._links.current(at_homes) or self._links.current(anywhere)
        if found is None:
            raise ModelNotFound(f"{name!r} has no version of number {id}")
        return found

    # -- all providers -----------------------------------------------------------------------

    def models(self, pattern: str) -> list[ModelRecord]:
        """As ``Backend.models``."""
        found = self._everywhere(lambda provider: provider.models(pattern), lambda one: one)
        records = _with_tags_once(found.values())
        return sorted(records, key=lambda record: (record.name, record.id))

    def children(self, id: int) -> list[ModelRecord]:
        """As ``Backend.children``."""
        found = self._everywhere(lambda provider: provider.children(id), lambda one: one)
        return [found[number] for number in sorted(found)]

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> list[Kin]:
        """As ``Backend.kin``: the best of the best of each provider."""
        found = self._everywhere(
            lambda provider: provider.kin(layers, pattern, limit, by, lower),
            lambda one: one.record,
        )
        sign, worst = (1.0 if lower else -1.0), float("inf")

        def place(one: Kin) -> tuple[int, int, float, int]:
            value = one.record.metrics.get(by) if by is not None else None
            metric = worst if value is None else sign * value
            return -one.nbytes, -one.layers, metric, -one.record.id

        return sorted(found.values(), key=place)[:limit]

    def _everywhere(
        self,
        ask: Callable[[Provider], Sequence[T]],
        record_of: Callable[[T], ModelRecord],
    ) -> dict[int, T]:
        """What all providers answer, each version once."""

        def asked(members: Members) -> dict[int, T]:
            answers = self._links.everyone(ask, _SECONDS)
            found: dict[int, T] = {}
            at_home = _Homes(members)
            for member, some in answers.got.items():
                for one in some:
                    record = record_of(one)
                    # A head elsewhere is left from before it moved; its home knows better.
                    if at_home.has(member, record.name):
                        found.setdefault(record.id, one)
            return found

        return self._links.current(asked)

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """As ``Backend.configs``."""
        found = {d: self._configs[d] for d in list(digests) if d in self._configs}
        missing = [digest for digest in dict.fromkeys(digests) if digest not in found]
        if missing:
            found |= self._links.current(partial(self._fetched, missing))
            self._configs |= {digest: found[digest] for digest in missing}
        while len(self._configs) > _CONFIGS:
            self._configs.popitem(last=False)
        return [found[digest] for digest in digests]

    def _fetched(self, digests: Sequence[bytes], _: Members) -> dict[bytes, bytes]:
        answers = self._links.everyone(lambda provider: provider.configs(digests), _SECONDS)
        found: dict[bytes, bytes] = {}
        for some in answers.got.values():
            found |= {d: data for d, data in zip(digests, some, strict=True) if data is not None}
        if any(digest not in found for digest in digests):
            if answers.silent:
                raise all_silent(answers.silent.values())
            raise Damaged(
                "no provider has a configuration that a model's graph refers to; run `sapwood "
                "store verify`"
            )
        return found

    # -- changes -----------------------------------------------------------------------------

    def change(self, name: str, what: str, call: Callable[[Provider], T]) -> T:
        """Change something of a model at all of its homes; all must answer before any is asked.

        One that missed it would go on saying what was before.
        """
        done: list[T] = []  # by a list that was replaced meanwhile: once more may find nothing

        def changed(members: Members) -> T:
            # Those of before come first: whoever copies from there looks once more afterwards.
            where = (*homes_before(members, name), *homes(members, name))
            self._links.require(where, f"{what} needs all homes of {name}")
            missing: list[ModelNotFound] = []
            for home in where:
                asked = self._links.each({home: partial(_if_found, call)})
                if asked.silent:
                    raise all_silent(asked.silent.values())
                answer, error = asked.got[home]
                if error is None:
                    done.append(cast("T", answer))
                else:
                    missing.append(error)
            if not done:
                raise missing[0]
            return done[-1]

        return self._links.current(changed)


class _Homes:
    """Which providers speak for which models."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._known: dict[str, frozenset[Member]] = {}

    def has(self, member: Member, name: str) -> bool:
        if name not in self._known:
            found = (*homes(self._members, name), *homes_before(self._members, name))
            self._known[name] = frozenset(found)
        return member in self._known[name]


def _if_found(
    ask: Callable[[Provider], T], provider: Provider
) -> tuple[T | None, ModelNotFound | None]:
    try:
        return ask(provider), None
    except ModelNotFound as error:
        return None, error


def _any_of(records: Iterable[ModelRecord | None]) -> ModelRecord | None:
    """The one that was removed, if any was: a removal is for all."""
    found = [record for record in records if record is not None]
    return max(found, key=lambda record: record.removed is not None, default=None)


def _with_tags_once(records: Iterable[ModelRecord]) -> list[ModelRecord]:
    """Where homes differ about a tag, it is at the latest version; see ``Asking.head``."""
    listed = sorted(records, key=lambda record: record.id)
    last: Mapping[tuple[str, str], int] = {(r.name, tag): r.id for r in listed for tag in r.tags}
    return [
        replace(r, tags=tuple(tag for tag in r.tags if last[r.name, tag] == r.id)) for r in listed
    ]
