"""Shards in fragments on k+m nodes, any k of which give them back.

A node's shards go to the k+m nodes that follow it in the order of the nodes, itself the first, so
that every node carries as much as any other, and a group never has two fragments on one node. With
``4+2`` any two nodes may be lost, at one and a half times the space; with ``k+1`` the parity is a
plain exclusive or.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.errors import ConfigError, TierError
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.codec import BLOCK_BYTES, Bytes, Codec, Scheme
from sapwood.tiers.digest import digest
from sapwood.tiers.fragments import AREA, Fragment, FragmentRecord
from sapwood.tiers.gathering import Gathering, enough
from sapwood.tiers.keeper import Keeper, Sink
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.peer import peers_of
from sapwood.tiers.rebuilt import ParityShard
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.spec import NodeMap

__all__ = ["ParityTier"]


class ParityTier:
    """Shards in fragments on several nodes. Fulfils ``Tier``.

    Args:
        scheme: ``k+m``, such as ``4+2``.
        nodes: the nodes, the addresses of their peer servers, and the token.
        keep: the folder this node's peer server keeps blobs in.
        timeout: seconds to wait for a node's next answer or block.
        block: bytes of data per block.
    """

    name = "parity"

    def __init__(
        self,
        scheme: str,
        nodes: NodeMap,
        keep: Path,
        *,
        timeout: float = 10.0,
        block: int = BLOCK_BYTES,
    ) -> None:
        """Nothing is connected yet."""
        self.scheme = Scheme.parse(scheme)
        ring = nodes.nodes
        if len(ring) < self.scheme.total:
            raise ConfigError(
                f"parity {scheme} needs {self.scheme.total} nodes, one for each fragment, but "
                f"there are {len(ring)}: {', '.join(ring)}; use fewer fragments, or more nodes"
            )
        self._codec = Codec(self.scheme, block=block)
        others = [node for node in ring if node != nodes.node]
        self._here = BlobFolder(keep)
        self._keepers: dict[str, Keeper] = {nodes.node: self._here}
        self._keepers.update(peers_of(nodes, others, timeout))
        at = ring.index(nodes.node)
        self.holders = [ring[(at + n) % len(ring)] for n in range(self.scheme.total)]
        """The nodes of this node's fragments, by fragment."""
        self._nodes = nodes
        self._gathering = Gathering(self._keepers)

    def put(self, record: ShardRecord, data: Any) -> None:
        """Code a shard block by block, sending each block's fragments as they are made."""
        content = record.encode()
        mark, total = digest(content), self.scheme.total
        memory = np.frombuffer(data, np.uint8)
        nbytes = self._codec.fragment_bytes(len(memory))
        with ExitStack() as stack:
            sinks: list[Sink] = []
            for index, node in enumerate(self.holders):
                fragment = Fragment(record.id, record.rank, self.scheme, mark, index)
                sink = self._keepers[node].put(fragment.blob, nbytes)
                sinks.append(stack.enter_context(closing(sink)))
            digests = self._send(memory, sinks)
            # Backwards: this node's own fragment, the first, is written while others write theirs.
            for index in reversed(range(total)):
                described = FragmentRecord(
                    code=self._codec.code,
                    block=self._codec.block,
                    nbytes=len(memory),
                    index=index,
                    digests=tuple(digests[index]),
                )
                sinks[index].seal(described.encode(content))
            for sink in sinks:
                sink.wait()

    def _send(self, memory: Bytes, sinks: Sequence[Sink]) -> list[list[str]]:
        """Code and send; the checksums by fragment and block."""
        digests: list[list[str]] = [[] for _ in sinks]
        largest = self._codec.fragment_bytes(min(self._codec.block, len(memory)))
        buffers = [np.empty(largest, np.uint8) for _ in sinks]
        for start, stop in self._codec.blocks(len(memory)):
            size = self._codec.fragment_bytes(stop - start)
            parts = [buffer[:size] for buffer in buffers]
            self._codec.encode(memory[start:stop], parts)
            for part, sink, marks in zip(parts, sinks, digests, strict=True):
                marks.append(digest(part))
                sink.write(part)
        return digests

    def shards(self) -> Sequence[Stored]:
        """The shards of which at least k fragments can be reached, on any node."""
        whole = [held[0].fragment for held in self._gathering.groups() if enough(held)]
        return sorted({Stored(one.id, one.rank) for one in whole})

    def open(self, stored: Stored) -> ParityShard:
        """Find the fragments of a shard, and rebuild it from k of them as it is read."""
        return self._gathering.open(stored)

    def mend(self, id: CheckpointId, others: Sequence[Tier] = ()) -> int:
        """Write the fragments anew that this node should have of a checkpoint, and has lost.

        Raises:
            TierError: no node can be looked at.
        """
        return self._gathering.mend(id, self._nodes.node, self._nodes.rank_nodes)

    def drop(self, id: CheckpointId) -> None:
        """Remove a checkpoint here, and from all nodes that have fragments of this one."""
        _, problems = self._gathering.each(
            self.holders, lambda keeper: keeper.drop(AREA, id.folder)
        )
        if problems:
            whys = "; ".join(problems.values())
            raise TierError(f"checkpoint {id} was not removed everywhere: {whys}")

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove from this node what killed runs left unfinished; other nodes do it themselves."""
        return self._here.clear(AREA, stale)

    def close(self) -> None:
        """End connections."""
        for keeper in self._keepers.values():
            keeper.close()
