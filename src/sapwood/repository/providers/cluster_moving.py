"""Bringing everything to where the list of providers places it.

Copies come first; only when all of them are there, what lies elsewhere is dropped. What is at its
places already is not touched: a provider that is added takes its share and no more, and what was
cut off goes on with the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from sapwood.errors import ModelExists, ModelNotFound
from sapwood.repository.base import ModelRecord
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Head, Member, Members, Part, Provider, VersionKey
from sapwood.repository.providers.cluster_copying import Copier
from sapwood.repository.providers.cluster_inventory import HeadCopies, heads_of, parts_of
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import homes
from sapwood.repository.providers.placement import places

__all__ = ["Moved", "move"]

T = TypeVar("T")


@dataclass
class Moved:
    """What was brought to its places."""

    tensors: int = 0
    """That were copied."""
    nbytes: int = 0
    """That were sent for them: less than they have, where the target had equal ones."""
    heads: int = 0
    """Versions whose heads were copied."""
    dropped: int = 0
    """Tensors and heads that were given up where they do not belong any more."""
    problems: list[str] = field(default_factory=list)
    """What could not be brought to its places, a line each; nothing of that was dropped."""


def move(
    links: Links, members: Members, sources: tuple[Member, ...], *, said: Callable[[str], None]
) -> Moved:
    """Copy what providers lack by this list, then drop what they have beside it.

    ``sources`` must all answer; they are those that may have something, or have to get it.

    Raises:
        Unreachable: one does not.
    """
    moving = _Moving(links, members, Copier(links), Moved())
    heads = heads_of(links, sources)
    for version, parts in parts_of(links, sources):
        if version.id in heads:
            said(f"looking at {version.name}@{version.version}")
            moving.tensors(heads[version.id], parts)
    for copies in heads.values():
        moving.head(copies)
    return moving.done


@dataclass
class _Moving:
    links: Links
    members: Members
    copier: Copier
    done: Moved

    # -- tensors -----------------------------------------------------------------------------

    def tensors(self, head: HeadCopies, parts: Mapping[Member, Part]) -> None:
        """Those of one version."""
        keys = self._keys(head)
        holders: dict[bytes, list[Member]] = {key: [] for key in keys}
        for member, part in parts.items():
            for key in part.keys:
                holders.setdefault(key, []).append(member)
        wanted = {key: places(self.members, key, head.version.name) for key in holders}
        lacking: dict[Member, dict[bytes, list[Member]]] = {}
        for key, members in wanted.items():
            for member in members:
                if member not in holders[key]:
                    lacking.setdefault(member, {})[key] = holders[key]
        failed = {key for target, some in lacking.items() for key in self._copy(head, target, some)}
        for member, part in parts.items():
            beside = [k for k in part.keys if member not in wanted[k] and k not in failed]
            if beside:
                self._ask(member, partial(_drop_part, version=head.version, keys=beside))
                self.done.dropped += len(beside)

    def _keys(self, head: HeadCopies) -> tuple[bytes, ...]:
        """Of the head: a tensor that no provider has is in no part."""
        reference = head.record.reference
        for holder in head.holders:
            try:
                _, _, keys = self._ask(holder, lambda provider: provider.head(reference))
            except ModelNotFound:  # removed meanwhile
                continue
            return tuple(key for key in keys if key)
        return ()

    def _copy(
        self, head: HeadCopies, target: Member, keys: Mapping[bytes, list[Member]]
    ) -> tuple[bytes, ...]:
        """Keys that could not be copied."""
        copied = self.copier.copy(head.version, keys, target)
        self.done.tensors += copied.tensors
        self.done.nbytes += copied.nbytes
        if copied.lacking and self._is_there(head):
            self.done.problems.append(
                f"{head.record.reference}: no sound copy of {len(copied.lacking)} of its tensors "
                f"is left for {target.name}"
            )
        return copied.lacking

    # -- heads -------------------------------------------------------------------------------

    def head(self, head: HeadCopies) -> None:
        """That of one version."""
        wanted = homes(self.members, head.version.name)
        for home in wanted:
            if home in head.holders:
                continue
            known = self._ask(home, partial(_known, version=head.version))
            if known is not None and known.removed is not None:
                self._remove(head)  # one home was away when it was removed from the others
                return
            try:
                self._copy_head(head, home)
            except ModelExists as error:
                self.done.problems.append(f"{head.record.reference} is not at {home.name}: {error}")
                return
            except ModelNotFound:  # removed meanwhile
                return
        for member in head.holders:
            if member not in wanted:
                self._ask(member, lambda provider: provider.drop_head(head.version))
                self.done.dropped += 1

    def _copy_head(self, head: HeadCopies, home: Member) -> None:
        source = head.holders[0]
        copy: Head = self._ask(source, lambda provider: provider.copy_head(head.version))
        model = replace(copy.model, tags=())
        whole = replace(copy, model=model)
        self._ask(home, lambda provider: provider.put_head(whole, synced=True))
        for tag in copy.model.tags:
            self._ask(home, partial(_tag, version=head.version, tag=tag))
        self.done.heads += 1
        if not self._ask(source, lambda provider: provider.has_head(head.version)):
            # Removed while it was copied; whoever did that did not see this copy.
            self._ask(home, lambda provider: provider.remove_head(head.version))

    def _remove(self, head: HeadCopies) -> None:
        for holder in head.holders:
            self._ask(holder, lambda provider: provider.remove_head(head.version))

    def _is_there(self, head: HeadCopies) -> bool:
        return any(
            self._ask(holder, lambda provider: provider.has_head(head.version))
            for holder in head.holders
        )

    def _ask(self, member: Member, call: Callable[[Provider], T]) -> T:
        answers = self.links.each({member: call})
        if answers.silent:
            raise all_silent(answers.silent.values())
        return answers.got[member]


def _drop_part(provider: Provider, version: VersionKey, keys: Sequence[bytes]) -> None:
    provider.drop_part(version, keys)


def _known(provider: Provider, version: VersionKey) -> ModelRecord | None:
    try:
        return provider.by_id(version.id, version.name)
    except ModelNotFound:
        return None


def _tag(provider: Provider, version: VersionKey, tag: str) -> None:
    """Tag a version, unless a later one has the tag: it was saved there meanwhile."""
    with suppress(ModelNotFound):
        if provider.find(Reference(version.name, tag)).id > version.id:
            return
    provider.tag(Reference(version.name, version.version), tag)
