"""Fragments and the nodes that have them: finding those of a shard, and writing lost ones anew."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from sapwood.errors import CheckpointError, SapwoodError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.codec import Codec, Scheme
from sapwood.tiers.fragments import AREA, Fragment
from sapwood.tiers.keeper import Keeper
from sapwood.tiers.rebuilt import Held, ParityShard
from sapwood.tiers.record import CheckpointId

__all__ = ["Gathering", "enough"]

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOKERS = 32
_DOWN_SECONDS = 30.0
"""A node that did not answer is not asked again for so long when a shard is opened."""


class Gathering:
    """The fragments on several nodes, taken together."""

    def __init__(self, keepers: Mapping[str, Keeper]) -> None:
        """``keepers`` by node; whoever made them closes them."""
        self.keepers = keepers
        self._codec_for = lru_cache(maxsize=8)(_codec)
        self._down: dict[str, float] = {}

    def groups(self, id: CheckpointId | None = None) -> list[list[Held]]:
        """Fragments that go together, of one checkpoint or of all; there may be too few of them.

        Raises:
            TierError: no node can be looked at.
        """
        held, problems = self._look(list(self.keepers), "" if id is None else id.folder)
        if len(problems) == len(self.keepers):
            raise TierError("no node can be looked at: " + "; ".join(problems.values()))
        for problem in problems.values():
            log.warning("tier parity: %s", problem)
        return list(_groups(held).values())

    def open(self, stored: Stored) -> ParityShard:
        """Find the fragments of a shard, and rebuild it from k of them as it is read.

        Raises:
            CheckpointError: too few were found.
        """
        now = time.monotonic()
        up = [node for node in self.keepers if self._down.get(node, 0.0) <= now]
        held, problems = self._find(stored, up)
        if not held and len(up) < len(self.keepers):
            held, problems = self._find(stored, list(self.keepers))
        if not held:
            why = "; ".join(["its fragments were not found", *problems.values()])
            raise CheckpointError(f"shard {stored.rank} of {stored.id}: {why}")
        return self.rebuilt(held, problems.values())

    def rebuilt(self, held: Iterable[Held], notes: Iterable[str] = ()) -> ParityShard:
        """The shard these fragments make up; ``notes`` say why others were not found."""
        return ParityShard(held, self._codec_for, notes)

    def remake(self, held: Sequence[Held], targets: Mapping[int, str]) -> None:
        """Rebuild a shard, and write fragments of it to nodes, coded as the others are.

        Raises:
            CheckpointError: too few fragments are sound.
            TierError: a node does not take its fragment.
        """
        with closing(self.rebuilt(held)) as shard:
            shard.remake({index: self.keepers[node] for index, node in targets.items()})

    def mend(self, id: CheckpointId, node: str, rank_nodes: Sequence[str]) -> int:
        """Write anew what ``node`` has lost of a checkpoint; how many fragments.

        Fragments are where ``ParityTier.put`` brings them, so that every node knows by itself
        which are its own, and none writes those of a node that is only out of reach.

        Raises:
            TierError: no node can be looked at.
        """
        ring, count = list(dict.fromkeys(rank_nodes)), 0
        for held in self.groups(id):
            first = held[0].fragment
            if not enough(held) or first.rank >= len(rank_nodes):
                continue
            index = (ring.index(node) - ring.index(rank_nodes[first.rank])) % len(ring)
            there = {one.fragment.index for one in held}
            if index >= first.scheme.total or index in there or node in {h.node for h in held}:
                continue
            try:
                self.remake(held, {index: node})
                count += 1
            except SapwoodError as error:
                log.warning("tier parity: shard %d of %s stays short: %s", first.rank, id, error)
        return count

    def each(
        self, nodes: Sequence[str], call: Callable[[Keeper], _T]
    ) -> tuple[dict[str, _T], dict[str, str]]:
        """Call nodes side by side, so that several dead ones cost no more time than one."""
        done: dict[str, _T] = {}
        problems: dict[str, str] = {}
        with ThreadPoolExecutor(min(len(nodes), _LOOKERS) or 1, "sapwood-parity") as pool:
            for node, future in [(n, pool.submit(call, self.keepers[n])) for n in nodes]:
                try:
                    done[node] = future.result()
                except (TierError, CheckpointError) as error:
                    problems[node] = str(error)
        return done, problems

    # -- looking around ----------------------------------------------------------------------

    def _find(self, stored: Stored, nodes: Sequence[str]) -> tuple[list[Held], dict[str, str]]:
        """The most complete set of fragments of a shard; none if all of them are too few."""
        held, problems = self._look(nodes, stored.id.folder)
        groups = _groups(h for h in held if h.fragment.rank == stored.rank)
        complete = [there for there in groups.values() if enough(there)]
        everyone = len(nodes) == len(self.keepers)
        # After the last look, too few are still worth handing on: the message then names them.
        choice = complete or (list(groups.values()) if everyone else [])
        return max(choice, key=len, default=[]), problems

    def _look(self, nodes: Sequence[str], group: str = "") -> tuple[list[Held], dict[str, str]]:
        """All fragments on some nodes, and what went wrong, by node."""
        found, problems = self.each(nodes, lambda keeper: keeper.names(AREA, group))
        later = time.monotonic() + _DOWN_SECONDS
        self._down.update(dict.fromkeys(found, 0.0) | dict.fromkeys(problems, later))
        held = [
            Held(fragment, node, self.keepers[node])
            for node, blobs in found.items()
            for blob in blobs
            if (fragment := Fragment.parse(blob)) is not None
        ]
        return held, problems


def enough(held: Sequence[Held]) -> bool:
    """Whether fragments that go together give their shard back."""
    return len({one.fragment.index for one in held}) >= held[0].fragment.scheme.k


def _groups(held: Iterable[Held]) -> dict[Fragment, list[Held]]:
    """Fragments that go together, by the first of them."""
    groups: dict[Fragment, list[Held]] = {}
    for one in held:
        groups.setdefault(replace(one.fragment, index=0), []).append(one)
    return groups


def _codec(scheme: Scheme, code: str, block: int) -> Codec:
    return Codec(scheme, code, block=block)
