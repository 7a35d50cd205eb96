"""Copying tensors of a version from one provider to another, through this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import StorageError
from sapwood.repository.merging import digest_of
from sapwood.repository.providers.base import Member, NewPart, PartRange, Provider, VersionKey
from sapwood.repository.providers.cluster_handles import size_of
from sapwood.repository.providers.cluster_links import Links
from sapwood.repository.providers.placement import key_of
from sapwood.storage import Durability

__all__ = ["Copied", "Copier"]

_BATCH = 256 * 2**20
"""Bytes in memory at a time; a larger tensor goes by itself."""
_KNOWN = 100_000
"""Tensors that are remembered to be at a provider, so that equal ones are not sent again."""


@dataclass
class Copied:
    """What was sent, and what could not be."""

    tensors: int = 0
    nbytes: int = 0
    lacking: tuple[bytes, ...] = ()
    """Keys that no holder could give."""


class Copier:
    """Copies parts. Remembers what it has copied where, since families share their tensors."""

    def __init__(self, links: Links) -> None:
        """``links`` stay the caller's to close."""
        self._links = links
        self._known: OrderedDict[tuple[Member, bytes], VersionKey] = OrderedDict()

    def copy(
        self, version: VersionKey, keys: Mapping[bytes, Sequence[Member]], target: Member
    ) -> Copied:
        """Give a provider tensors of a version, from the first holder of each that can.

        Raises:
            Unreachable: the target does not answer.
            StorageError: it cannot keep them.
        """
        done = Copied()
        for batch in _batches(list(keys)):
            data = self._read(version, {key: keys[key] for key in batch})
            if data:
                done.nbytes += self._put(version, data, target)
                done.tensors += len(data)
            done.lacking += tuple(key for key in batch if key not in data)
        return done

    def _read(
        self, version: VersionKey, keys: Mapping[bytes, Sequence[Member]]
    ) -> dict[bytes, memoryview]:
        memory = {key: fresh_memory(size_of(key)).data for key in keys}
        found: dict[bytes, memoryview] = {}
        holders = list(dict.fromkeys(member for some in keys.values() for member in some))
        for holder in holders:
            wanted = [key for key in keys if key not in found and holder in keys[key]]
            for key in self._from(holder, version, wanted, memory):
                if key_of(memory[key]) == key:  # damaged there; another copy may be sound
                    found[key] = memory[key]
        return found

    def _from(
        self,
        holder: Member,
        version: VersionKey,
        keys: Sequence[bytes],
        memory: Mapping[bytes, memoryview],
    ) -> Sequence[bytes]:
        if not keys:
            return ()
        ranges = [PartRange(key, 0, memory[key]) for key in keys]
        try:
            answers = self._links.each({holder: lambda p: p.read_part(version, ranges)})
        except StorageError:
            # One of them is damaged there; by itself, each of the others can be had.
            alone = [self._from(holder, version, [key], memory) for key in keys if len(keys) > 1]
            return [key for some in alone for key in some]
        if holder in answers.silent:
            return ()
        missing = set(answers.got[holder])
        return [key for index, key in enumerate(keys) if index not in missing]

    def _put(self, version: VersionKey, data: Mapping[bytes, memoryview], target: Member) -> int:
        """Bytes that were sent."""
        known = {key: self._known[target, key] for key in data if (target, key) in self._known}
        same = {key: (other, digest_of(data[key])) for key, other in known.items()}
        answers = self._links.each({target: partial(_put, version=version, data=data, same=same)})
        if target in answers.silent:
            raise answers.silent[target]
        for key in data:
            self._known[target, key] = version
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return answers.got[target]


def _put(
    provider: Provider,
    version: VersionKey,
    data: Mapping[bytes, memoryview],
    same: Mapping[bytes, tuple[VersionKey, bytes]],
) -> int:
    keys = tuple(data)
    refused: set[int] = set()
    while True:
        same_as = {i: same[key] for i, key in enumerate(keys) if key in same and i not in refused}
        sources = [None if i in same_as else data[key] for i, key in enumerate(keys)]
        part = NewPart(version=version, keys=keys, same_as=same_as)
        # As durable as the place can: what lies elsewhere is dropped afterwards.
        again = set(provider.put_part(part, sources, Durability.REPLICATED)) - refused
        if not again:
            return sum(len(source) for source in sources if source is not None)
        refused |= again


def _batches(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for key in keys:
        if batch and sum(map(size_of, batch)) + size_of(key) > _BATCH:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch
