"""Saving in a cluster: the tensors first, each at its places, and then the head at its homes.

A version is there when a head is. Whoever dies before that leaves parts, which ``gc`` drops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import ConfigError, ModelExists, StoreError, Unreachable
from sapwood.repository.base import NOTHING, ModelRecord, NewModel, fresh
from sapwood.repository.local import equal_bytes
from sapwood.repository.merging import digest_of
from sapwood.repository.providers.base import (
    Head,
    Member,
    Members,
    NewPart,
    Provider,
    StaleMembers,
    VersionKey,
)
from sapwood.repository.providers.cluster_handles import TensorHandle, handle_of, size_of
from sapwood.repository.providers.cluster_heads import (
    HeadsPut,
    give_up,
    put_heads,
    reserve,
    take_back,
)
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_reading import read_handles
from sapwood.repository.providers.placement import key_of, places
from sapwood.storage import Durability

__all__ = ["save"]

log = logging.getLogger(__name__)
_TRIES = 5
_LONG_SECONDS = 600.0
"""A save that takes longer looks whether its first tensors are still there: ``gc`` drops old parts
that belong to no version."""


def save(
    links: Links,
    model: NewModel,
    sources: Sequence[memoryview],
    alike: Mapping[int, int],
    durability: Durability,
) -> ModelRecord:
    """As ``Backend.save``."""
    if durability == Durability.REPLICATED and links.members.replicas < 2:
        raise ConfigError(
            "durability='replicated': this repository keeps one copy of everything; its providers "
            "must be started with --replicas 2 or more, or ask for 'synced'"
        )
    saving = _Saving(links, model, durability)
    saving.take(sources, alike)
    for _ in range(_TRIES):
        try:
            return links.current(saving.run)
        except ModelExists:
            # Of numbers, somebody who could reach other homes may have been given the same.
            if model.version is not None:
                raise
    raise StoreError(f"{model.name}: {_TRIES} numbers in a row were taken by others; try again")


@dataclass
class _Source:
    """A tensor's bytes, and a version that may have it already."""

    data: memoryview
    like: TensorHandle | None = None
    digest: bytes = b""


@dataclass
class _Saving:
    """One save. What it has reached outlasts a change of the list of providers."""

    links: Links
    model: NewModel
    durability: Durability
    keys: tuple[bytes, ...] = ()
    sources: dict[bytes, _Source] = field(default_factory=dict)
    version: VersionKey | None = None
    reserved: dict[Member, VersionKey] = field(default_factory=dict)
    holders: dict[Member, list[bytes]] = field(default_factory=dict)
    """Who may have parts by now."""
    heads: HeadsPut = field(default_factory=HeadsPut)

    def take(self, sources: Sequence[memoryview], alike: Mapping[int, int]) -> None:
        """Find the key of each tensor, and which of them an earlier version has."""
        found: dict[int, bytes] = {NOTHING: b""}
        for index, data in enumerate(sources):
            other = alike.get(index, NOTHING)
            like = handle_of(other) if other != NOTHING else None
            found[fresh(index)] = self._take(memoryview(data).cast("B"), like)
        for blob in dict.fromkeys(self.model.manifest.blobs):
            if blob not in found:
                handle = handle_of(blob)
                memory = fresh_memory(size_of(handle.key)).data
                read_handles(self.links, [(handle, 0, memory)])
                found[blob] = self._take(memory, handle)
        self.keys = tuple(found[blob] for blob in self.model.manifest.blobs)

    def _take(self, data: memoryview, like: TensorHandle | None) -> bytes:
        key = key_of(data)
        if not key:
            return key
        known = self.sources.setdefault(key, _Source(data))
        if known.data is not data and not equal_bytes(known.data, data):
            raise StoreError(
                f"{self.model.name}: two tensors of {len(data)} bytes differ and have the same "
                "key; change one of them"
            )
        if like is not None and like.key == key and known.like is None:
            known.like, known.digest = like, digest_of(data)
        return key

    # -- in order ----------------------------------------------------------------------------

    def run(self, members: Members) -> ModelRecord:
        """All of it, by one list of providers."""
        try:
            if self.version is None:
                model = self.model
                self.version, found = reserve(self.links, members, model.name, model.version)
                self.reserved = dict(found)
            began = time.monotonic()
            put = self._put_parts(members, self.version)
            if time.monotonic() - began > _LONG_SECONDS:
                self._look_again(members, self.version, put)
            return self._put_heads(members, self.version)
        except StaleMembers:
            raise
        except BaseException:
            self._clear_away()
            raise

    def _put_parts(self, members: Members, version: VersionKey) -> dict[Member, list[bytes]]:
        """Who has which keys now."""
        wanted: dict[Member, list[bytes]] = {}
        for key in self.sources:
            for member in places(members, key, self.model.name):
                wanted.setdefault(member, []).append(key)
        self.holders |= wanted
        answers = self.links.each(
            {member: self._putter(version, keys) for member, keys in wanted.items()}
        )
        kept = {key for member in answers.got for key in wanted[member]}
        if answers.silent and (len(kept) < len(self.sources) or self._all_copies):
            raise all_silent(answers.silent.values())
        self._say_lacking(answers.silent)
        return {member: wanted[member] for member in answers.got}

    def _putter(self, version: VersionKey, keys: Sequence[bytes]) -> Callable[[Provider], None]:
        def put(provider: Provider) -> None:
            sent = {i for i, key in enumerate(keys) if self.sources[key].like is None}
            for _ in range(_TRIES):
                part, data = self._part(version, keys, sent)
                refused = provider.put_part(part, data, self.durability)
                if not refused:
                    return
                sent |= set(refused)
            raise StoreError(f"{provider.address} asks again for tensors that it was sent")

        return put

    def _part(
        self, version: VersionKey, keys: Sequence[bytes], sent: set[int]
    ) -> tuple[NewPart, list[memoryview | None]]:
        same_as: dict[int, tuple[VersionKey, bytes]] = {}
        data: list[memoryview | None] = []
        for index, key in enumerate(keys):
            source = self.sources[key]
            if index in sent or source.like is None:
                data.append(source.data)
            else:
                data.append(None)
                same_as[index] = (source.like.version, source.digest)
        return NewPart(version=version, keys=tuple(keys), same_as=same_as), data

    def _look_again(
        self, members: Members, version: VersionKey, put: Mapping[Member, Sequence[bytes]]
    ) -> None:
        def has_all(provider: Provider, keys: Sequence[bytes]) -> bool:
            found = provider.parts(version.id - 1, 1)
            return bool(found) and found[0].version == version and set(keys) <= set(found[0].keys)

        answers = self.links.each({m: partial(has_all, keys=keys) for m, keys in put.items()})
        if not all(answers.got.values()):
            self._put_parts(members, version)

    def _put_heads(self, members: Members, version: VersionKey) -> ModelRecord:
        nothing = (NOTHING,) * len(self.model.manifest.blobs)
        model = replace(self.model.with_blobs(nothing), id=version.id, version=version.version)
        self.heads.silent = {}
        put_heads(
            self.links,
            members,
            Head(model=model, keys=self.keys),
            self.heads,
            synced=self.durability >= Durability.SYNCED,
        )
        silent = self.heads.silent
        if silent and (self._all_copies or not self.heads.records):
            take_back(self.links, self.heads, version)
            raise Unreachable(
                f"{version.name}@{version.version} may be saved or not, look before you try again: "
                f"{all_silent(silent.values())}"
            )
        self._say_lacking(silent)
        others = {m: key for m, key in self.reserved.items() if key.version != version.version}
        give_up(self.links, others)
        return self.heads.record

    # -- when it fails -----------------------------------------------------------------------

    def _clear_away(self) -> None:
        """Give back what was taken; what a head that may be there needs stays for ``gc``."""
        version, self.version = self.version, None
        give_up(self.links, self.reserved)
        if version is not None and not (self.heads.silent or self.heads.records):
            calls = dict.fromkeys(self.holders, lambda provider: provider.drop_part(version))
            self.links.quietly(calls)
        self.reserved, self.holders, self.heads = {}, {}, HeadsPut()

    @property
    def _all_copies(self) -> bool:
        return self.durability is Durability.REPLICATED

    def _say_lacking(self, silent: Mapping[Member, Unreachable]) -> None:
        if silent and self.version is not None:
            names = ", ".join(sorted(member.name for member in silent))
            log.warning(
                "%s@%s has no copy at %s: run `sapwood store members repair` when all answer",
                self.version.name,
                self.version.version,
                names,
            )
