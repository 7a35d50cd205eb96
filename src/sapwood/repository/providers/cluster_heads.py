"""Heads of versions to be: a number and a name that nobody else has, and the head at its homes.

Homes are asked one after the other, everybody in the same order: of two who save the same version,
whoever comes first to the first home goes on, and the other one ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from sapwood.errors import Denied, ModelExists, ModelNotFound, StoreError, Unreachable
from sapwood.repository.base import ModelRecord
from sapwood.repository.providers.base import Head, Member, Members, Provider, VersionKey
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import homes, homes_before

__all__ = ["HeadsPut", "give_up", "put_heads", "reserve", "take_back"]


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
    now, found = homes(members, name), dict[Member, VersionKey]()
    silent: list[Unreachable] = []
    try:
        for home in (*now, *homes_before(members, name)):
            answers = links.each({home: lambda provider: provider.reserve(name, version)})
            found |= answers.got
            silent += answers.silent.values()
        if not any(home in found for home in now):
            raise all_silent(silent)
    except BaseException:
        give_up(links, found)
        raise
    # A home that was away knows less than the others.
    label = max((key.version for key in found.values()), key=_as_number)
    return VersionKey(name, label, max(key.id for key in found.values())), found


def _as_number(version: str) -> int:
    return int(version) if version.isdecimal() and version.isascii() else 0


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
