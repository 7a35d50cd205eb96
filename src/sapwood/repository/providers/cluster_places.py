"""Where a cluster's client looks for things: the homes of a head, the places of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sapwood.repository.base import ModelRecord
from sapwood.repository.providers.base import Member, Members, VersionKey
from sapwood.repository.providers.placement import places

__all__ = ["HEAD", "homes", "homes_before", "search_order", "version_of"]

HEAD = b""
"""What placement takes for the key of a head."""


def homes(members: Members, name: str) -> Sequence[Member]:
    """The providers that a model's heads belong to."""
    return places(members, HEAD, name)


def homes_before(members: Members, name: str) -> Sequence[Member]:
    """Those that had them and may have some still, while data moves."""
    if not members.before:
        return ()
    now = homes(members, name)
    before = places(replace(members, members=members.before), HEAD, name)
    return [member for member in before if member not in now]


def search_order(members: Members, key: bytes, name: str) -> Sequence[Member]:
    """Every provider that may have a tensor, the likeliest first."""
    found = list(_all_places(members, members.members, key, name))
    found += (m for m in _all_places(members, members.before, key, name) if m not in found)
    return found


def _all_places(
    members: Members, among: tuple[Member, ...], key: bytes, name: str
) -> Sequence[Member]:
    if not among:
        return ()
    return places(replace(members, members=among, replicas=len(among)), key, name)


def version_of(record: ModelRecord) -> VersionKey:
    """What providers call a version."""
    return VersionKey(record.name, record.version, record.id)
