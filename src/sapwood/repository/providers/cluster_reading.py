"""Reading in a cluster: each tensor from one of its places, and from the next where one fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import Damaged, Gone, StorageError, Unreachable
from sapwood.repository.base import NOTHING, BlobPart
from sapwood.repository.providers.base import Member, Members, PartRange, Provider, VersionKey
from sapwood.repository.providers.cluster_handles import TensorHandle, handle_of, size_of
from sapwood.repository.providers.cluster_links import Links, all_silent
from sapwood.repository.providers.cluster_places import homes, homes_before, search_order

__all__ = ["mapped", "read", "read_handles"]

log = logging.getLogger(__name__)


@dataclass
class _Wanted:
    """A range of a tensor, and the providers that have not been asked for it yet."""

    handle: TensorHandle
    start: int
    out: memoryview
    places: list[Member]


def read(links: Links, parts: Sequence[BlobPart]) -> None:
    """As ``Backend.read``."""
    read_handles(links, [(handle_of(part.blob), part.start, part.out) for part in parts])


def read_handles(links: Links, ranges: Iterable[tuple[TensorHandle, int, memoryview]]) -> None:
    """Fill buffers with ranges of tensors; one request to each provider, unless one fails.

    Raises:
        Gone: a version was removed.
        Damaged: no provider has a tensor.
        Unreachable: a provider does not answer, and no other has what it has.
    """
    checked = [_checked(handle, start, out) for handle, start, out in ranges if len(out)]
    links.current(lambda members: _read(links, members, checked))


def _checked(
    handle: TensorHandle, start: int, out: memoryview
) -> tuple[TensorHandle, int, memoryview]:
    nbytes = size_of(handle.key)
    if start < 0 or start + len(out) > nbytes:
        raise Damaged(
            f"a tensor of {nbytes} bytes was asked for {start} to {start + len(out)}: its manifest "
            "does not belong to it"
        )
    return handle, start, out


def _read(
    links: Links, members: Members, ranges: Sequence[tuple[TensorHandle, int, memoryview]]
) -> None:
    places = _Places(links, members)
    left = [_Wanted(h, start, out, places.of(h)) for h, start, out in ranges]
    failures: dict[Member, StorageError] = {}
    while left:
        exhausted = [wanted for wanted in left if not wanted.places]
        if exhausted:
            raise _nowhere(links, members, exhausted[0].handle, failures)
        left = _ask(links, left, failures)


class _Places:
    """The search order of each tensor, those first that answer; worked out once for equal keys."""

    def __init__(self, links: Links, members: Members) -> None:
        self._links, self._members = links, members
        self._known: dict[tuple[bytes, str], Sequence[Member]] = {}

    def of(self, handle: TensorHandle) -> list[Member]:
        key = handle.key, handle.version.name
        if key not in self._known:
            found = search_order(self._members, *key)
            self._known[key] = sorted(found, key=lambda member: self._links.link(member).down)
        return list(self._known[key])


def _ask(
    links: Links, left: Sequence[_Wanted], failures: dict[Member, StorageError]
) -> list[_Wanted]:
    """Ask the first place of each; what is left after that."""
    groups: dict[Member, list[_Wanted]] = {}
    for wanted in left:
        groups.setdefault(wanted.places.pop(0), []).append(wanted)
    answers = links.each({m: partial(_fill, groups=_by_version(g)) for m, g in groups.items()})
    again = []
    for member, group in groups.items():
        if member in answers.silent:
            failures[member] = answers.silent[member]
            again += group
            continue
        missing, error = answers.got[member]
        if error is not None:
            log.warning("provider %s at %s: %s", member.name, member.address, error)
            failures[member] = error
        again += missing
    return again


def _by_version(group: Sequence[_Wanted]) -> dict[VersionKey, list[_Wanted]]:
    found: dict[VersionKey, list[_Wanted]] = {}
    for wanted in group:
        found.setdefault(wanted.handle.version, []).append(wanted)
    return found


def _fill(
    provider: Provider, groups: Mapping[VersionKey, Sequence[_Wanted]]
) -> tuple[list[_Wanted], StorageError | None]:
    """What this provider did not have, or could not read."""
    missing, failure = list[_Wanted](), None
    for version, group in groups.items():
        try:
            numbers = provider.read_part(
                version, [PartRange(w.handle.key, w.start, w.out) for w in group]
            )
            missing += [group[number] for number in numbers]
        except Unreachable:
            raise
        except StorageError as error:  # damaged here; another copy may be sound
            missing += group
            failure = error
        except Gone:
            missing += group
    return missing, failure


def _nowhere(
    links: Links,
    members: Members,
    handle: TensorHandle,
    failures: Mapping[Member, StorageError],
) -> Exception:
    """Why no provider has a tensor."""
    version = handle.version
    name = f"{version.name}@{version.version}"
    where = (*homes(members, version.name), *homes_before(members, version.name))
    heads = links.each({home: lambda provider: provider.has_head(version) for home in where})
    if not any(heads.got.values()) and not heads.silent:
        return Gone(f"{name} was removed")
    silent = [error for error in failures.values() if isinstance(error, Unreachable)]
    if silent:
        return Unreachable(f"a tensor of {name} cannot be read: {all_silent(silent)}")
    if failures:
        return next(iter(failures.values()))
    return Damaged(
        f"{name}: no provider has one of its tensors ({size_of(handle.key)} bytes); run `sapwood "
        "store verify`"
    )


# -- without copying ---------------------------------------------------------------------------


def mapped(links: Links, blobs: Sequence[int]) -> Mapping[int, memoryview] | None:
    """As ``Mappable.mapped``: what can be mapped is, the rest is read; None if nothing can be."""
    handles = [handle_of(blob) for blob in blobs if blob != NOTHING]
    found = links.current(lambda members: _map(links, members, handles))
    if not found and handles:
        return None
    left: dict[int, memoryview] = {
        handle: fresh_memory(size_of(handle.key)).data for handle in handles if handle not in found
    }
    read_handles(links, [(handle_of(blob), 0, memory) for blob, memory in left.items()])
    return {**found, **left}


def _map(links: Links, members: Members, handles: Sequence[TensorHandle]) -> dict[int, memoryview]:
    places = _Places(links, members)
    groups: dict[Member, list[TensorHandle]] = {}
    for handle in handles:
        groups.setdefault(places.of(handle)[0], []).append(handle)
    calls = {member: partial(_map_at, handles=group) for member, group in groups.items()}
    answers = links.each(calls)
    return {blob: memory for some in answers.got.values() for blob, memory in some.items()}


def _map_at(provider: Provider, handles: Sequence[TensorHandle]) -> dict[int, memoryview]:
    versions: dict[VersionKey, list[TensorHandle]] = {}
    for handle in handles:
        versions.setdefault(handle.version, []).append(handle)
    found: dict[int, memoryview] = {}
    for version, group in versions.items():
        try:
            here = provider.map_part(version, [handle.key for handle in group])
        except Unreachable:
            raise
        except (StorageError, Gone):  # reading tells what is wrong, or finds another copy
            continue
        found |= {handle: here[handle.key] for handle in group if here and handle.key in here}
    return found
