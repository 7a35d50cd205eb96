"""All bytes of a checkpoint, wherever they are: in a rank's memory, or in shards that waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sapwood.errors import CheckpointError
from sapwood.repository.base import NOTHING, Backend
from sapwood.state.catalog import Entry
from sapwood.state.packed import EXTRA_STATE
from sapwood.tiers.manifest import join
from sapwood.tiers.record import ShardRecord
from sapwood.tiers.versions.index import Key, read_blob
from sapwood.tiers.versions.shard import StagedShard

__all__ = ["CheckpointParts", "PartSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """Some bytes of a tensor."""

    start: int
    """Offset in the tensor."""
    nbytes: int
    data: memoryview | None = None
    """Where they are, if that is memory."""
    blob: int = NOTHING
    """Else the blob they are in, and where in it."""
    offset: int = 0
    shared: bool = False
    """The blob is all of an earlier version's tensor."""


@dataclass(kw_only=True)
class CheckpointParts:
    """The records of all ranks, and where the bytes are that they tell of."""

    contents: dict[int, bytes] = field(default_factory=dict)
    """Records as they were put, by rank."""
    records: dict[int, ShardRecord] = field(default_factory=dict)
    pieces: dict[Key, list[PartSource]] = field(default_factory=dict)
    extras: dict[int, PartSource] = field(default_factory=dict)
    """What each rank's extras refer to, where there is some."""

    @classmethod
    def of_memory(cls, record: ShardRecord, memory: memoryview) -> CheckpointParts:
        """Of a shard that is all of a checkpoint."""
        found = cls()
        found.contents[record.rank], found.records[record.rank] = record.encode(), record
        for piece in record.shard.pieces:
            data = memory[piece.at : piece.at + piece.nbytes]
            source = PartSource(start=piece.start, nbytes=piece.nbytes, data=data)
            found.pieces.setdefault(piece.key, []).append(source)
        if record.extras_bytes:
            data = memory[record.shard.extras_at : record.nbytes]
            found.extras[record.rank] = PartSource(start=0, nbytes=len(data), data=data)
        return found

    @classmethod
    def of_staged(cls, shards: Mapping[int, StagedShard]) -> CheckpointParts:
        """Of the shards of all ranks, which waited for each other."""
        found = cls()
        for rank, shard in sorted(shards.items()):
            record = shard.record
            found.contents[rank], found.records[rank] = shard.content, record
            for piece in record.shard.pieces:
                place = shard.places[piece]
                source = PartSource(
                    start=piece.start,
                    nbytes=piece.nbytes,
                    blob=place.blob,
                    offset=place.offset,
                    shared=place.shared,
                )
                found.pieces.setdefault(piece.key, []).append(source)
            if record.extras_bytes:
                found.extras[rank] = PartSource(
                    start=0, nbytes=record.extras_bytes, blob=shard.extras_blob
                )
        return found

    @property
    def first(self) -> ShardRecord:
        """The record of rank 0."""
        return self.records[0]

    def check(self, what: str) -> None:
        """See that the shards are of one checkpoint, and hold every byte once.

        Raises:
            CheckpointError: they are not, or do not.
        """
        join(self.contents, next(iter(self.records.values())), what)
        for entry in self.first.catalog.entries:
            at = 0
            for part in self.of(entry):
                if part.start != at:
                    raise CheckpointError(
                        f"the shards of {what} do not hold each byte of {entry.file} {entry.name} "
                        f"once: what begins at {part.start} follows what ends at {at}"
                    )
                at += part.nbytes
            if at != entry.nbytes:
                raise CheckpointError(
                    f"the shards of {what} hold {at} bytes of {entry.file} {entry.name}, which has "
                    f"{entry.nbytes}"
                )

    def of(self, entry: Entry) -> list[PartSource]:
        """A tensor's bytes in order."""
        parts = (part for part in self.pieces.get(entry.key, []) if part.nbytes)
        return sorted(parts, key=lambda part: part.start)

    def region(self, backend: Backend) -> memoryview:
        """What the extras of rank 0 refer to, if the model's state dict needs it."""
        source = self.extras.get(0)
        if source is None or EXTRA_STATE not in self.first.extras.get("shared", {}):
            return memoryview(b"")
        if source.data is not None:
            return source.data
        memory = memoryview(bytearray(source.nbytes))
        read_blob(backend, source.blob, source.offset, memory)
        return memory
