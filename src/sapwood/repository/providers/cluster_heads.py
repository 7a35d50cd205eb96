"""Heads of versions to be: a number and a name that nobody else has, and the head at its homes.

Homes are asked one after the other, everybody in the same order: of two who save the same version,
whoever comes first to the first home goes on, and the other one ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from sapwood.errors import Denied, ModelExists, ModelNotFound, StoreError, Unreachable
from sapwood.repository.base import ModelRecord
from sapwood.repository.providers.base import Head, Member, Members, Provider, VersionKey
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import homes, homes_before

__all__ = ["HeadsPut", "give_up", "put_heads", "reserve", "take_back"]

_TRIES = 5


@dataclass
class HeadsPut:
    """What has become of a head."""

    records: dict[Member, ModelRecord] = field(default_factory=dict)
    silent: dict[Member, Unreachable] = field(default_factory=dict)
    """Homes that did not answer; they may have it or not."""

    @property
    def record(self) -> ModelRecord:
        """As the first home that answered has it."""
        return next(iter(self.records.values()))


def reserve(
    links: Links, members: Members, name: str, version: str | None
) -> tuple[VersionKey, Mapping[Member, VersionKey]]:
    """A version to be, and what was reserved where.

    Raises:
        ModelExists: it is there, or somebody else is saving it.
        Unreachable: no home answers.
    """
    now = homes(members, name)
    where = [*now, *homes_before(members, name)]
    for _ in range(_TRIES):
        reserved = _Reserved(links, name)
        try:
            behind = reserved.at(where, version)
            if behind is None and not any(home in reserved.found for home in now):
                raise all_silent(reserved.silent)
        except BaseException:
            give_up(links, reserved.found)
            raise
        if behind is None:
            keys = reserved.found.values()
            return VersionKey(name, reserved.label, max(key.id for key in keys)), reserved.found
        give_up(links, reserved.found)
        # That home knows of versions which the first does not: it was away when they came.
        where.remove(behind)
        where.insert(0, behind)
    raise StoreError(f"the homes of {name} do not agree on its versions; try again")


@dataclass
class _Reserved:
    """Reservations of one version at several homes."""

    links: Links
    name: str
    label: str = ""
    found: dict[Member, VersionKey] = field(default_factory=dict)
    silent: list[Unreachable] = field(default_factory=list)

    def at(self, where: Sequence[Member], version: str | None) -> Member | None:
        """Reserve at all; the first home gives a number, and who has that taken is returned."""
        for home in where:
            wanted = version or self.label or None
            try:
                answers = self.links.each({home: partial(_reserve, name=self.name, label=wanted)})
            except ModelExists:
                if version is not None:
                    raise
                return home
            self.found |= answers.got
            self.silent += answers.silent.values()
            self.label = next((key.version for key in self.found.values()), "")
        return None


def _reserve(provider: Provider, name: str, label: str | None) -> VersionKey:
    return provider.reserve(name, label)


def give_up(links: Links, reserved: Mapping[Member, VersionKey]) -> None:
    """End reservations that were not used."""
    calls = {home: partial(_remove, version=version) for home, version in reserved.items()}
    # What stays reserved cannot be saved again as long as this process lives.
    links.quietly(calls, insist=True)


def put_heads(links: Links, members: Members, head: Head, put: HeadsPut, *, synced: bool) -> None:
    """Put a head at all of its homes that answer; ``put`` says which, also if this raises.

    Raises:
        ModelExists: another version has its name; the head is nowhere.
    """
    try:
        for home in homes(members, head.model.name):
            _put(links, home, lambda provider: provider.put_head(head, synced=synced), put)
    except ModelExists:
        take_back(links, put, _key_of(head))
        raise


def _put(
    links: Links, home: Member, call: Callable[[Provider], ModelRecord], put: HeadsPut
) -> None:
    answers = links.each({home: call})
    if answers.silent:
        # The answer may be what was lost, not the question: to put it again is harmless.
        answers = links.each({home: call})
    put.records |= answers.got
    put.silent |= answers.silent


def take_back(links: Links, put: HeadsPut, version: VersionKey) -> None:
    """Remove a head that must not stay."""
    for home in put.records:
        try:
            put.silent |= links.each({home: partial(_remove, version=version)}).silent
        except Denied as error:
            raise StoreError(
                f"{version.name}@{version.version} is at {home.name} and could not be taken back: "
                f"{error}; ask who may delete it to remove it"
            ) from error
    put.records = {}


def _remove(provider: Provider, version: VersionKey) -> None:
    with suppress(ModelNotFound):
        provider.remove_head(version)


def _key_of(head: Head) -> VersionKey:
    return VersionKey(head.model.name, head.model.version or "", head.model.id or 0)
