"""Who sends which bytes to whom: every byte of the state once, from N donors to M clones.

Each tensor is shared out over the donors as for a checkpoint, and over the clones in the same way;
where the two overlap, a donor sends to a clone. With as many donors as clones that is one to one.
On one machine a clone gets all from the donors instead: passing bytes on would copy them as often.
Small parts of a bucket that take the same way are packed into one message, for a message costs more
than a few kilobytes do. The plan follows from the manifest alone, so both sides make it themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sapwood.state.catalog import Catalog
from sapwood.state.shards import plan_shards

__all__ = ["ClonePlan", "Key", "Message", "Part", "plan_direct", "plan_messages", "plan_whole"]

Key = tuple[str, str]
LARGE_PART = 256 * 1024
"""A part of at least this size is a message by itself, sent from where it lies."""
PACKED = 1024 * 1024
"""Smaller parts are packed into messages of about this size."""
MESSAGE = 8 * 1024 * 1024
"""Larger parts are cut: a donor that must hurry can leave the rest of a tensor for later."""
MOST_PARTS = 512
"""Of a message."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of one tensor."""

    key: Key
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """What one donor sends one clone in one go."""

    tag: int
    """Unique in the plan."""
    donor: int
    clone: int
    bucket: int
    """The bucket whose update makes it ready."""
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class ClonePlan:
    """All messages of a fork, in the order in which buckets are updated."""

    catalog: Catalog
    donors: int
    clones: int
    messages: tuple[Message, ...]

    def sent_by(self, donor: int) -> list[Message]:
        """A donor's messages."""
        return [m for m in self.messages if m.donor == donor]

    def received_by(self, clone: int) -> list[Message]:
        """A clone's messages."""
        return [m for m in self.messages if m.clone == clone]

    @property
    def checks_tag(self) -> int:
        """The tag of the checksums that each donor sends each clone when all is sent."""
        return len(self.messages)

    @property
    def extras_tag(self) -> int:
        """The tag of what a donor has beside tensors."""
        return len(self.messages) + 1

    @property
    def digest(self) -> str:
        """The same on both sides, or nothing must be sent: a wrong size kills a process."""
        rows = [
            [m.tag, m.donor, m.clone, m.bucket, [[*p.key, p.start, p.stop] for p in m.parts]]
            for m in self.messages
        ]
        whole = [self.donors, self.clones, self.catalog.to_json(), rows]
        text = json.dumps(whole, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plan_messages(
    catalog: Catalog, buckets: Sequence[Sequence[Key]], donors: int, clones: int
) -> ClonePlan:
    """The messages that bring all tensors of ``buckets``, which are those of the catalog.

    ``buckets`` are in the order in which they are updated.
    """
    ways = dict[Key, list[tuple[int, int, Part]]]()
    sources = _owned(catalog, donors)
    targets = _owned(_held_by_all(catalog, clones), clones)
    for key in catalog.by_key:
        ways[key] = list(_overlaps(key, sources[key], targets[key]))
    messages: list[Message] = []
    for bucket, keys in enumerate(buckets):
        by_way: dict[tuple[int, int], list[Part]] = {}
        for key in keys:
            for donor, clone, part in ways[key]:
                by_way.setdefault((donor, clone), []).append(part)
        for (donor, clone), parts in sorted(by_way.items()):
            for packed in _packed(parts):
                messages.append(Message(len(messages), donor, clone, bucket, packed))
    return ClonePlan(catalog, donors, clones, tuple(messages))


Owned = tuple[int, int, int]


def _held_by_all(catalog: Catalog, world: int) -> Catalog:
    """The same tensors on ranks that all hold each of them."""
    return Catalog.from_json([[*row[:4], list(range(world))] for row in catalog.to_json()])


def _owned(catalog: Catalog, world: int) -> Mapping[Key, list[Owned]]:
    """Which of a tensor's holders is responsible for which of its bytes, in order."""
    found: dict[Key, list[Owned]] = {key: [] for key in catalog.by_key}
    for shard in plan_shards(catalog, world).shards:
        for piece in shard.pieces:
            found[piece.key].append((piece.start, piece.stop, shard.rank))
    return {key: sorted(owned) for key, owned in found.items()}


def _overlaps(
    key: Key, sources: Sequence[Owned], targets: Sequence[Owned]
) -> Iterator[tuple[int, int, Part]]:
    for start, stop, donor in sources:
        for first, last, clone in targets:
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                yield donor, clone, Part(key, begin, end)


def _packed(parts: Iterable[Part]) -> Iterator[tuple[Part, ...]]:
    small: list[Part] = []
    size = 0
    for part in parts:
        if part.nbytes >= LARGE_PART:
            for start in range(part.start, part.stop, MESSAGE):
                yield (Part(part.key, start, min(start + MESSAGE, part.stop)),)
            continue
        small.append(part)
        size += part.nbytes
        if size >= PACKED:
            yield tuple(small)
            small, size = [], 0
    if small:
        yield tuple(small)


def _gathered(parts: Iterable[Part]) -> Iterator[tuple[Part, ...]]:
    """Messages of about the same size, of parts that are sent from where they lie."""
    some: list[Part] = []
    room = MESSAGE
    for part in parts:
        start = part.start
        while start < part.stop:
            stop = min(part.stop, start + room)
            some.append(Part(part.key, start, stop))
            room -= stop - start
            start = stop
            if not room or len(some) == MOST_PARTS:
                yield tuple(some)
                some, room = [], MESSAGE
    if some:
        yield tuple(some)


def plan_direct(
    catalog: Catalog, buckets: Sequence[Sequence[Key]], donors: int, clones: int
) -> ClonePlan:
    """Each donor sends its share to every clone; its messages to all of them follow each other."""
    sources = _owned(catalog, donors)
    messages: list[Message] = []
    for bucket, keys in enumerate(buckets):
        for donor in range(donors):
            owned = [(key, share) for key in keys for share in sources[key]]
            parts = [Part(key, start, stop) for key, (start, stop, who) in owned if who == donor]
            for packed in _gathered(parts):
                for clone in range(clones):
                    messages.append(Message(len(messages), donor, clone, bucket, packed))
    return ClonePlan(catalog, donors, clones, tuple(messages))


def plan_whole(
    catalog: Catalog, buckets: Sequence[Sequence[Key]], donors: int, clones: int
) -> ClonePlan:
    """Each clone gets the whole state from one donor: what the paper compares with."""
    messages: list[Message] = []
    for bucket, keys in enumerate(buckets):
        parts = [Part(key, 0, nbytes) for key in keys if (nbytes := catalog.by_key[key].nbytes)]
        packed = list(_packed(parts))
        for clone in range(clones):
            for some in packed:
                messages.append(Message(len(messages), clone % donors, clone, bucket, some))
    return ClonePlan(catalog, donors, clones, tuple(messages))
