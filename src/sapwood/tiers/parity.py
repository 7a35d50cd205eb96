"""Shards in fragments on k+m nodes, any k of which give them back.

A node's shards go to the k+m nodes that follow it in the order of the nodes, itself the first, so
that every node carries as much as any other, and a group never has two fragments on one node. With
``4+2`` any two nodes may be lost, at one and a half times the space; with ``k+1`` the parity is a
plain exclusive or.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sapwood.errors import CheckpointError, ConfigError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.codec import BLOCK_BYTES, Bytes, Codec, Scheme
from sapwood.tiers.digest import digest
from sapwood.tiers.fragments import AREA, Fragment, FragmentRecord
from sapwood.tiers.keeper import Keeper, Sink
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.peer import peers_of
from sapwood.tiers.rebuilt import Held, ParityShard
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.spec import NodeMap

__all__ = ["ParityTier"]

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOKERS = 32
_DOWN_SECONDS = 30.0
"""A node that did not answer is not asked again for so long when a shard is opened."""


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
        self._codec_for = lru_cache(maxsize=8)(_codec)
        others = [node for node in ring if node != nodes.node]
        self._here = BlobFolder(keep)
        self._keepers: dict[str, Keeper] = {nodes.node: self._here}
        self._keepers.update(peers_of(nodes, others, timeout))
        at = ring.index(nodes.node)
        self.holders = [ring[(at + n) % len(ring)] for n in range(self.scheme.total)]
        """The nodes of this node's fragments, by fragment."""
        self._down: dict[str, float] = {}

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
        held, problems = self._look(list(self._keepers))
        if len(problems) == len(self._keepers):
            raise TierError("no node can be looked at: " + "; ".join(problems.values()))
        for problem in problems.values():
            log.warning("tier parity: %s", problem)
        groups = _groups(held).items()
        return sorted({Stored(key.id, key.rank) for key, there in groups if _enough(key, there)})

    def open(self, stored: Stored) -> ParityShard:
        """Find the fragments of a shard, and rebuild it from k of them as it is read."""
        now = time.monotonic()
        up = [node for node in self._keepers if self._down.get(node, 0.0) <= now]
        held, problems = self._find(stored, up)
        if not held and len(up) < len(self._keepers):
            held, problems = self._find(stored, list(self._keepers))
        if not held:
            why = "; ".join(["its fragments were not found", *problems.values()])
            raise CheckpointError(f"shard {stored.rank} of {stored.id}: {why}")
        return ParityShard(held, self._codec_for, problems.values())

    def drop(self, id: CheckpointId) -> None:
        """Remove a checkpoint here, and from all nodes that have fragments of this one."""
        _, problems = self._each(self.holders, lambda keeper: keeper.drop(AREA, id.folder))
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

    # -- looking around ----------------------------------------------------------------------

    def _find(self, stored: Stored, nodes: Sequence[str]) -> tuple[list[Held], dict[str, str]]:
        """The most complete set of fragments of a shard; none if all of them are too few."""
        held, problems = self._look(nodes, stored.id.folder)
        groups = _groups(h for h in held if h.fragment.rank == stored.rank)
        complete = [there for key, there in groups.items() if _enough(key, there)]
        everyone = len(nodes) == len(self._keepers)
        # After the last look, too few are still worth handing on: the message then names them.
        choice = complete or (list(groups.values()) if everyone else [])
        return max(choice, key=len, default=[]), problems

    def _look(self, nodes: Sequence[str], group: str = "") -> tuple[list[Held], dict[str, str]]:
        """All fragments on some nodes, and what went wrong, by node."""
        found, problems = self._each(nodes, lambda keeper: keeper.names(AREA, group))
        later = time.monotonic() + _DOWN_SECONDS
        self._down.update(dict.fromkeys(found, 0.0) | dict.fromkeys(problems, later))
        held = [
            Held(fragment, node, self._keepers[node])
            for node, blobs in found.items()
            for blob in blobs
            if (fragment := Fragment.parse(blob)) is not None
        ]
        return held, problems

    def _each(
        self, nodes: Sequence[str], call: Callable[[Keeper], _T]
    ) -> tuple[dict[str, _T], dict[str, str]]:
        """Call all nodes side by side, so that several dead ones cost no more time than one."""
        done: dict[str, _T] = {}
        problems: dict[str, str] = {}
        with ThreadPoolExecutor(min(len(nodes), _LOOKERS) or 1, "sapwood-parity") as pool:
            for node, future in [(n, pool.submit(call, self._keepers[n])) for n in nodes]:
                try:
                    done[node] = future.result()
                except (TierError, CheckpointError) as error:
                    problems[node] = str(error)
        return done, problems


def _groups(held: Iterable[Held]) -> dict[Fragment, list[Held]]:
    """Fragments that go together, by the first of them."""
    groups: dict[Fragment, list[Held]] = {}
    for one in held:
        groups.setdefault(replace(one.fragment, index=0), []).append(one)
    return groups


def _enough(key: Fragment, held: Iterable[Held]) -> bool:
    return len({one.fragment.index for one in held}) >= key.scheme.k


def _codec(scheme: Scheme, code: str, block: int) -> Codec:
    return Codec(scheme, code, block=block)
