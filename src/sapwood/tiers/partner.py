"""A copy of every shard on another node: its partner, the next one in the order of the nodes.

    node a ──> node b ──> node c ──> node a

A node that comes back empty gets its shards from its partner. Two partners that are lost together
take what the second kept for the first with them; parity survives more for less space.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.tiers.base import Stored, Tier, open_checked, read_shard
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.keeper import Blob, Keeper
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.peer import peers_of
from sapwood.tiers.record import CheckpointId, Range, ShardRecord
from sapwood.tiers.spec import NodeMap

__all__ = ["KeptShard", "PartnerTier"]

log = logging.getLogger(__name__)


class PartnerTier:
    """Shards of this node on its partner, and those this node keeps as a partner. Fulfils ``Tier``.

    Args:
        nodes: the nodes, the addresses of their peer servers, and the token.
        keep: the folder this node's peer server keeps blobs in.
        timeout: seconds to wait for the partner's next answer or block.
    """

    name = "partner"

    def __init__(self, nodes: NodeMap, keep: Path, *, timeout: float = 10.0) -> None:
        """Nothing is connected yet."""
        ring = nodes.nodes
        if len(ring) < 2:
            raise ConfigError(
                f"tier partner: {nodes.node} is the only node, and a copy on the same node would "
                "be lost with it; use more nodes, or another tier"
            )
        self.partner = ring[(ring.index(nodes.node) + 1) % len(ring)]
        self._there = peers_of(nodes, [self.partner], timeout)[self.partner]
        self._here = BlobFolder(keep)
        self._ranks = nodes.ranks

    def put(self, record: ShardRecord, data: Any) -> None:
        """Send a shard to the partner."""
        with closing(self._there.put(self._blob(record.id, record.rank), record.nbytes)) as sink:
            sink.write(data)
            sink.seal(record.encode())
            sink.wait()

    def shards(self) -> Sequence[Stored]:
        """What this node keeps, and what its partner keeps, if it can be reached."""
        found = {*_stored(self._here.names(self.name))}
        try:
            found.update(_stored(self._there.names(self.name)))
        except TierError as error:
            if not found:
                raise
            log.warning("tier partner: only what is kept here is seen: %s", error)
        return sorted(found)

    def open(self, stored: Stored) -> KeptShard:
        """A shard kept here, else from the partner."""
        blob = self._blob(stored.id, stored.rank)
        problems = []
        keepers: list[Keeper] = [self._here, self._there]
        for keeper in keepers:
            try:
                return KeptShard.open(keeper, blob)
            except (CheckpointError, TierError) as error:
                problems.append(str(error))
        raise CheckpointError(
            f"shard {stored.rank} of {stored.id} is neither kept here nor at node {self.partner}: "
            + "; ".join(problems)
        )

    def mend(self, id: CheckpointId, others: Sequence[Tier] = ()) -> int:
        """Send the partner what it has lost of this node's shards of a checkpoint; how many.

        They come from ``others``, tiers of this node.

        Raises:
            TierError: the partner cannot be reached.
        """
        there = {stored.rank for stored in _stored(self._there.names(self.name, id.folder))}
        count = 0
        for tier in others:
            for rank in sorted({*self._ranks} - there):
                if self._copy(Stored(id, rank), tier):
                    there.add(rank)
                    count += 1
        return count

    def _copy(self, stored: Stored, tier: Tier) -> bool:
        """Send the partner a shard of another tier; whether it was there and sound."""
        try:
            with closing(open_checked(tier, stored)) as shard:
                record, memory = shard.record, read_shard(shard)
        except (CheckpointError, TierError):
            return False
        self.put(record, memory)
        return True

    def drop(self, id: CheckpointId) -> None:
        """Remove a checkpoint here and at the partner."""
        self._here.drop(self.name, id.folder)
        self._there.drop(self.name, id.folder)

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove from this node what killed runs left unfinished; other nodes do it themselves."""
        return self._here.clear(self.name, stale)

    def close(self) -> None:
        """End connections."""
        self._there.close()

    def _blob(self, id: CheckpointId, rank: int) -> Blob:
        return Blob(self.name, id.folder, f"shard-{rank}")


@dataclass(frozen=True)
class KeptShard:
    """A shard that is one blob of a keeper. Fulfils ``StoredShard``."""

    record: ShardRecord
    keeper: Keeper
    blob: Blob

    @classmethod
    def open(cls, keeper: Keeper, blob: Blob) -> KeptShard:
        """Read the record.

        Raises:
            CheckpointError: it is missing, damaged, or does not fit the bytes.
            TierError: the keeper cannot be reached.
        """
        what = f"{blob.name} of {blob.group}"
        record = ShardRecord.decode(keeper.record(blob), f"the record of {what}")
        size = keeper.size(blob)
        if size != record.nbytes:
            raise CheckpointError(f"{what} has {size} bytes, its record says {record.nbytes}")
        return cls(record, keeper, blob)

    def read_into(self, part: Range, out: Any) -> None:
        """Fetch a range."""
        try:
            self.keeper.ask(self.blob, part.at, part.nbytes).into(out)
        except TierError as error:
            raise CheckpointError(f"cannot read {self.blob.name}: {error}") from error

    def close(self) -> None:
        """Connections are the keeper's."""


def _stored(blobs: Sequence[Blob]) -> list[Stored]:
    found = []
    for blob in blobs:
        id = CheckpointId.parse(blob.group)
        rank = blob.name.removeprefix("shard-")
        if id is not None and rank.isdecimal():
            found.append(Stored(id, int(rank)))
    return found
