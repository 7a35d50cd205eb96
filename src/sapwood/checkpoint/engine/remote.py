"""The shards in the memory of a node's engine, read where they are: only a descriptor is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.link import Link
from sapwood.checkpoint.engine.messages import to_id
from sapwood.checkpoint.engine.wire import WireError
from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId, Range, ShardRecord

__all__ = ["RemoteMemory", "RemoteShard"]


class RemoteShard:
    """A shard in memory of the engine, which this process sees too. Fulfils ``StoredShard``."""

    def __init__(self, record: ShardRecord, arena: Arena) -> None:
        """``arena`` is this object's from now on."""
        self.record = record
        self._arena = arena
        if arena.nbytes < record.nbytes:
            arena.close()
            raise CheckpointError(
                f"shard {record.rank} of {record.id} has {arena.nbytes} bytes in memory, its "
                f"record says {record.nbytes}"
            )

    def read_into(self, part: Range, out: Any) -> None:
        """Copy a range."""
        source: Any = self._arena.bytes[part.at : part.at + part.nbytes]
        memoryview(out).cast("B")[:] = memoryview(source)

    def close(self) -> None:
        """Unmap it."""
        self._arena.close()


class RemoteMemory:
    """The memory tier of a living engine, for reading; the engine itself fills it."""

    name = "memory"

    def __init__(self, link: Callable[[], Link | None], *, timeout: float) -> None:
        """``link`` gives the connection there is now."""
        self._link = link
        self._timeout = timeout

    def put(self, record: ShardRecord, data: Any) -> None:
        """Refused: a shard comes into the engine's memory when it is submitted."""
        raise TierError("the engine's memory is filled by the engine alone")

    def shards(self) -> Sequence[Stored]:
        """The newest shard of each rank of this node; none if there is no engine."""
        link = self._link()
        if link is None:
            return []
        try:
            answer, _ = link.ask("list", self._timeout)
            return [Stored(to_id(row[:2]), int(row[2])) for row in answer["shards"]]
        except (WireError, KeyError, TypeError, ValueError, IndexError) as error:
            raise TierError(f"the engine does not say what it has in memory: {error}") from error

    def open(self, stored: Stored) -> RemoteShard:
        """Map a shard's memory into this process."""
        link = self._link()
        if link is None:
            raise CheckpointError("there is no engine that could have a shard in memory")
        id = [stored.id.step, stored.id.attempt]
        answer, fds = link.ask("open", self._timeout, id=id, rank=stored.rank)
        if not fds:
            raise CheckpointError(str(answer.get("error", "the engine sent no memory")))
        arena = Arena.attach(fds[0])
        try:
            what = f"shard {stored.rank} of {stored.id} in memory"
            return RemoteShard(ShardRecord.decode(str(answer["record"]).encode(), what), arena)
        except BaseException:
            arena.close()
            raise

    def drop(self, id: CheckpointId) -> None:
        """Refused: use the engine's own ``drop``."""
        raise TierError("the engine's memory is emptied by the engine alone")

    def close(self) -> None:
        """Nothing runs."""
