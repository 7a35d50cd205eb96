"""The newest shard of each rank, left in the staging memory it was captured into.

It costs nothing: the memory is lent until a newer shard comes. In an engine that outlives the ranks
it survives their death, though not the node's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId, Range, ShardRecord

__all__ = ["MemoryShard", "MemoryTier"]


@dataclass(frozen=True)
class MemoryShard:
    """A shard in memory. Fulfils ``StoredShard``."""

    record: ShardRecord
    data: memoryview
    given_back: Callable[[], None]

    def read_into(self, part: Range, out: Any) -> None:
        """Copy a range."""
        memoryview(out).cast("B")[:] = self.data[part.at : part.at + part.nbytes]

    def close(self) -> None:
        """Nothing was opened."""


class MemoryTier:
    """The last shard of each rank. Fulfils ``Tier``."""

    name = "memory"

    def __init__(self) -> None:
        """Start empty."""
        self._held: dict[int, MemoryShard] = {}
        self._lock = threading.Lock()

    def put(self, record: ShardRecord, data: Any) -> None:
        """Keep a shard by itself, in memory that is the caller's to leave alone."""
        self.keep(record, data, lambda: None)

    def keep(self, record: ShardRecord, data: Any, given_back: Callable[[], None]) -> None:
        """Keep a shard in lent memory; ``given_back`` is called when it is no longer needed."""
        shard = MemoryShard(record, memoryview(data).cast("B"), given_back)
        with self._lock:
            old = self._held.get(record.rank)
            self._held[record.rank] = shard
        if old is not None:
            old.given_back()

    def shards(self) -> Sequence[Stored]:
        """The newest shard of each rank."""
        with self._lock:
            return sorted(Stored(s.record.id, rank) for rank, s in self._held.items())

    def open(self, stored: Stored) -> MemoryShard:
        """The shard, if it is still the newest of its rank."""
        with self._lock:
            shard = self._held.get(stored.rank)
        if shard is None or shard.record.id != stored.id:
            raise CheckpointError(f"shard {stored.rank} of {stored.id} is no longer in memory")
        return shard

    def drop(self, id: CheckpointId) -> None:
        """Give the memory of a checkpoint back."""
        with self._lock:
            gone = [rank for rank, s in self._held.items() if s.record.id == id]
            shards = [self._held.pop(rank) for rank in gone]
        for shard in shards:
            shard.given_back()

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            shards, self._held = list(self._held.values()), {}
        for shard in shards:
            shard.given_back()
