"""Care of a cluster: dropping what no version needs, and looking whether all copies are there.

A part is dropped when every provider that could have its head has said that it has none. Nothing
is counted across providers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sapwood.errors import ModelNotFound, SapwoodError
from sapwood.repository.providers.base import Member, Members, Part, Provider, VersionKey
from sapwood.repository.providers.cluster_inventory import HeadCopies, heads_of, parts_of
from sapwood.repository.providers.cluster_links import Links, all_of
from sapwood.repository.providers.cluster_places import homes, homes_before
from sapwood.repository.providers.placement import places
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified

__all__ = ["gc", "verify"]

Said = Callable[[str], None]


def gc(links: Links, members: Members, *, quiet: float, said: Said) -> Swept:
    """Drop parts without a head, then let each provider give back its room."""
    there = _answering(links, members, said)
    living = set(heads_of(links, there))
    said("looking for tensors that no version needs")
    for version, parts in parts_of(links, there):
        if version.id not in living and _is_over(links, members, version, parts, quiet):
            calls = dict.fromkeys(parts, lambda provider, v=version: provider.drop_part(v))
            links.each(calls)
    said = _one_at_a_time(said)
    swept = links.each({m: partial(_gc, quiet=quiet, said=_named(m, said)) for m in there}).got
    return Swept(
        packs=sum(one.packs for one in swept.values()),
        freed=sum(one.freed for one in swept.values()),
        drafts=sum(one.drafts for one in swept.values()),
        live=sum(one.live for one in swept.values()),
    )


def _answering(links: Links, members: Members, said: Said) -> Sequence[Member]:
    """The providers that answer; enough that every head is at one of them."""
    everyone = all_of(members)
    answers = links.everyone(lambda provider: provider.members().epoch, _SECONDS)
    for member, error in answers.silent.items():
        said(f"without {member.name}: {error}")
    return [member for member in everyone if member in answers.got]


_SECONDS = 30.0


def _gc(provider: Provider, quiet: float, said: Said) -> Swept:
    return provider.gc(quiet=quiet, said=said)


def _is_over(
    links: Links,
    members: Members,
    version: VersionKey,
    parts: Mapping[Member, Part],
    quiet: float,
) -> bool:
    """Whether a version was removed, or will never be there."""
    where = (*homes(members, version.name), *homes_before(members, version.name))
    heads = links.each(dict.fromkeys(where, partial(_state, version=version)))
    if heads.silent or "there" in heads.got.values():
        return False
    # A save under way has parts and no head yet; one that was removed had its head.
    youngest = max(part.created for part in parts.values())
    return "removed" in heads.got.values() or time.time() - youngest >= quiet


def _state(provider: Provider, version: VersionKey) -> str:
    if provider.has_head(version):
        return "there"
    try:
        removed = provider.by_id(version.id, version.name).removed is not None
    except ModelNotFound:
        return "unknown"
    # Between the two questions it may have come.
    return "removed" if removed else "there"


# -- verify ------------------------------------------------------------------------------------


def verify(links: Links, members: Members, *, said: Said) -> Verified:
    """Each provider by itself, and then whether everything is at all of its places."""
    everyone = all_of(members)
    said = _one_at_a_time(said)
    answers = links.each({m: partial(_verify, said=_named(m, said)) for m in everyone})
    found = Verified()
    for member, one in answers.got.items():
        found.blobs += one.blobs
        found.nbytes += one.nbytes
        found.unhashed += one.unhashed
        found.problems += [f"{member.name}: {problem}" for problem in one.problems]
    found.problems += [str(error) for error in answers.silent.values()]
    if members.before:
        found.problems.append(
            "data is on the way to its places: run `sapwood store members repair`"
        )
    said("comparing the providers")
    there = [member for member in everyone if member in answers.got]
    heads = heads_of(links, there)
    found.models = len(heads)
    checks = _Checks(links, members, set(there), found.problems)
    checks.names(heads)
    left = dict(heads)
    for version, parts in parts_of(links, there):
        if version.id in left:
            checks.copies(left.pop(version.id), parts)
    for copies in left.values():
        checks.copies(copies, {})
    return found


def _verify(provider: Provider, said: Said) -> Verified:
    return provider.verify(said=said)


class _Checks:
    """Compares what providers have with what they should have."""

    def __init__(
        self, links: Links, members: Members, there: set[Member], problems: list[str]
    ) -> None:
        self._links, self._members, self._there = links, members, there
        self._problems = problems

    def names(self, heads: Mapping[int, HeadCopies]) -> None:
        """Two versions of one name: two clients saved it, and each reached another home."""
        seen: dict[str, int] = {}
        for id, copies in heads.items():
            name = str(copies.record.reference)
            if name in seen:
                self._problems.append(
                    f"{name} is two versions, of numbers {seen[name]} and {id}: remove it, and "
                    "save it again"
                )
            seen[name] = id

    def copies(self, head: HeadCopies, parts: Mapping[Member, Part]) -> None:
        """Whether a version is at all of its places."""
        problems = self._of_head(head) + self._of_tensors(head, parts)
        if problems and self._still_there(head):
            self._problems += problems

    def _of_head(self, head: HeadCopies) -> list[str]:
        name = head.record.name
        wanted = [] if self._members.before else self._only_there(homes(self._members, name))
        allowed = (*homes(self._members, name), *homes_before(self._members, name))
        lacking = [m.name for m in wanted if m not in head.holders]
        strays = [m.name for m in head.holders if m not in allowed]
        return [f"{head.record.reference} is not at {at}" for at in lacking] + [
            f"{at} has {head.record.reference}, which belongs elsewhere" for at in strays
        ]

    def _of_tensors(self, head: HeadCopies, parts: Mapping[Member, Part]) -> list[str]:
        try:
            answers = self._links.each(
                {head.holders[0]: lambda provider: provider.head(head.record.reference)}
            )
            _, manifest, keys = answers.got[head.holders[0]]
        except (SapwoodError, KeyError) as error:
            return [f"{head.record.reference}: {error}"]
        found = {member: set(part.keys) for member, part in parts.items()}
        problems = []
        for name, number in manifest.names:
            if keys[number]:
                problems += self._of_key(f"{head.record.reference} {name}", keys[number], found)
        return problems

    def _of_key(self, what: str, key: bytes, found: Mapping[Member, set[bytes]]) -> list[str]:
        holders = [member for member, keys in found.items() if key in keys]
        if not holders:
            return [f"{what}: no provider that answers has its bytes"]
        if self._members.before:
            return []
        wanted = self._only_there(places(self._members, key, what.partition("@")[0]))
        return [f"{what} has no copy at {m.name}" for m in wanted if m not in holders]

    def _only_there(self, members: Sequence[Member]) -> list[Member]:
        return [member for member in members if member in self._there]

    def _still_there(self, head: HeadCopies) -> bool:
        """Saved or removed meanwhile, it is no problem."""
        calls = dict.fromkeys(head.holders, lambda provider: provider.has_head(head.version))
        answers = self._links.each(calls)
        return all(answers.got.values())


def _named(member: Member, said: Said) -> Said:
    return lambda line: said(f"{member.name}: {line}")


def _one_at_a_time(said: Said) -> Said:
    lock = threading.Lock()

    def say(line: str) -> None:
        with lock:
            said(line)

    return say
