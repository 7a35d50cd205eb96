"""The contract of a tier: a place where the shards of checkpoints rest.

A shard is there whole or not at all: ``put`` returns when the bytes and their record would survive
what the tier promises to survive, and ``shards`` lists a shard only after its ``put`` returned, or
would have. A checkpoint can be restored when every rank's shard is in some tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sapwood.errors import CheckpointError
from sapwood.tiers.digest import matches
from sapwood.tiers.record import CheckpointId, Range, ShardRecord

__all__ = [
    "Mendable",
    "Misplaced",
    "Pinning",
    "Recorded",
    "Stored",
    "StoredShard",
    "Tier",
    "open_checked",
    "read_range",
    "read_shard",
    "verify",
]


@dataclass(frozen=True, order=True)
class Stored:
    """One shard in some tier."""

    id: CheckpointId
    rank: int


class StoredShard(Protocol):
    """A shard that can be read; close it when done."""

    @property
    def record(self) -> ShardRecord:
        """What the shard holds; its own checksum was verified."""
        ...

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range's bytes into a writable buffer of that size.

        Raises:
            CheckpointError: they cannot be read, or are fewer.
        """
        ...

    def close(self) -> None:
        """Give back what reading needs."""
        ...


class Tier(Protocol):
    """A place where shards rest. Calls may come from several threads, for different shards."""

    @property
    def name(self) -> str:
        """As in settings, messages and traces: memory, local, partner, parity, external, s3."""
        ...

    def put(self, record: ShardRecord, data: Any) -> None:
        """Keep a shard, whose memory is ``data``; when it returns, the shard is safe here.

        Raises:
            TierError: it could not be done now; calling again with the same shard is always right.
        """
        ...

    def shards(self) -> Sequence[Stored]:
        """The shards here, whole ones only, in order.

        Raises:
            TierError: the place cannot be looked at now.
        """
        ...

    def open(self, stored: Stored) -> StoredShard:
        """Read a shard.

        Raises:
            CheckpointError: it is not here, or damaged.
        """
        ...

    def drop(self, id: CheckpointId) -> None:
        """Remove what is here of a checkpoint; it is no error if there is nothing."""
        ...

    def close(self) -> None:
        """End what the tier has running; what rests here stays."""
        ...


@runtime_checkable
class Mendable(Protocol):
    """A tier that rests on several nodes, of which some may come back empty."""

    @property
    def name(self) -> str:
        """As the tier's."""
        ...

    def mend(self, id: CheckpointId, others: Sequence[Tier]) -> int:
        """Write anew what is lost of a checkpoint and this node is to look after; how many parts.

        ``others`` are this node's other tiers, cheapest first.

        Raises:
            TierError: it could not be done now.
        """
        ...


@runtime_checkable
class Pinning(Protocol):
    """A tier in which somebody can say that a checkpoint is to stay; it is not dropped then."""

    def pinned(self) -> set[CheckpointId]:
        """Those that are to stay.

        Raises:
            TierError: the place cannot be looked at now.
        """
        ...


class Misplaced(CheckpointError):
    """A shard that is sound, but was written for another place than it is in."""


def open_checked(tier: Tier, stored: Stored) -> StoredShard:
    """Open a shard, and see that it is the one its place says.

    A record proves only that its own bytes are sound. A folder that was renamed to another step,
    or shards that were swapped between ranks, are sound and still a state of no step.

    Raises:
        Misplaced: it was written for another place.
        CheckpointError: it is not there, or damaged.
    """
    shard = tier.open(stored)
    record = shard.record
    if Stored(record.id, record.rank) == stored:
        return shard
    shard.close()
    raise Misplaced(
        f"shard {stored.rank} of checkpoint {stored.id} is damaged: what lies there was written as "
        f"shard {record.rank} of checkpoint {record.id}; files were moved or a folder was renamed: "
        "put them back, or remove them"
    )


@runtime_checkable
class Recorded(Protocol):
    """A tier that can tell what a shard was also where its bytes are damaged."""

    def record(self, stored: Stored) -> ShardRecord:
        """The record of a shard, by itself.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        ...


def read_range(shard: StoredShard, part: Range, out: Any) -> None:
    """Read a range and verify it.

    Raises:
        CheckpointError: it is damaged.
    """
    shard.read_into(part, out)
    record = shard.record
    if not matches(out, part.digest, record.algorithm):
        piece = part.piece
        raise CheckpointError(
            f"shard {record.rank} of checkpoint {record.id} is damaged: bytes "
            f"{piece.start + part.start} to {piece.start + part.start + part.nbytes} of "
            f"{piece.file} {piece.name} do not match their checksum"
        )


def read_shard(shard: StoredShard) -> bytearray:
    """The memory of a whole shard, verified.

    Raises:
        CheckpointError: it is damaged.
    """
    memory = bytearray(shard.record.nbytes)
    view = memoryview(memory)
    for part in shard.record.ranges:
        read_range(shard, part, view[part.at : part.at + part.nbytes])
    return memory


def verify(shard: StoredShard) -> int:
    """Read and check every range; bytes read.

    Raises:
        CheckpointError: one is damaged.
    """
    buffer = memoryview(bytearray(shard.record.range_bytes))
    for part in shard.record.ranges:
        read_range(shard, part, buffer[: part.nbytes])
    return shard.record.nbytes
