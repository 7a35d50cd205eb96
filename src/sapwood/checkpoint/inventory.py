"""What is where: the shards every rank can reach, and which checkpoint they make whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from sapwood.errors import CheckpointError, TierError
from sapwood.runtime.group import Group
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.record import CheckpointId

__all__ = ["Candidate", "Inventory", "take_inventory"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard can be read: by one rank, in one tier."""

    order: int
    """The tier's place in the list of tiers: cheap ones come first."""
    reader: int


@dataclass(slots=True)
class Candidate:
    """A checkpoint of which something is there."""

    id: CheckpointId
    world: int
    created: float
    places: dict[int, list[Place]] = field(default_factory=dict)
    """By shard, cheapest first."""

    @property
    def missing(self) -> list[int]:
        """Shards that are nowhere."""
        return [rank for rank in range(self.world) if not self.places.get(rank)]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All checkpoints the ranks can see together; the same on every rank."""

    candidates: tuple[Candidate, ...]
    """Newest first; of two attempts at a step, the later one."""
    notes: tuple[str, ...]
    """What could not be looked at, and why."""
    damaged: tuple[int, ...] = ()
    """Steps that are there, but with a tier none of whose records of it can be read."""

    def find(self, step: int | None) -> list[Candidate]:
        """Those of a step, or all."""
        return [c for c in self.candidates if step is None or c.id.step == step]


def take_inventory(group: Group, tiers: Sequence[Tier]) -> Inventory:
    """Look into all tiers, on all ranks, and put together what each of them found."""
    texts = group.gather_text("checkpoints", json.dumps(_look(tiers)))
    found: dict[CheckpointId, Candidate] = {}
    told: dict[str, None] = {}
    damaged: set[int] = set()
    for reader, text in enumerate(texts):
        theirs, their_notes, their_damaged = json.loads(text)
        told.update(dict.fromkeys(their_notes))
        damaged.update(their_damaged)
        for order, step, attempt, world, created, shards in theirs:
            id = CheckpointId(step, attempt)
            candidate = found.setdefault(id, Candidate(id, world, created))
            for rank in shards:
                candidate.places.setdefault(rank, []).append(Place(order, reader))
    for candidate in found.values():
        for places in candidate.places.values():
            places.sort(key=lambda p: (p.order, p.reader))
    newest = sorted(found.values(), key=lambda c: (c.id.step, c.created), reverse=True)
    return Inventory(tuple(newest), tuple(told), tuple(sorted(damaged)))


Row = tuple[int, int, str, int, float, list[int]]


def _look(tiers: Sequence[Tier]) -> tuple[list[Row], list[str], list[int]]:
    """What is in the tiers, what cannot be read and why, and the steps of that."""
    rows: list[Row] = []
    notes: list[str] = []
    damaged: list[int] = []
    for order, tier in enumerate(tiers):
        try:
            stored = tier.shards()
        except TierError as error:
            notes.append(f"{tier.name}: {error}")
            continue
        for id, ranks in _by_id(stored).items():
            try:
                world, created = _world_of(tier, id, ranks)
            except (CheckpointError, TierError) as error:
                notes.append(f"{tier.name}, checkpoint {id}: {error}")
                damaged.append(id.step)
                continue
            rows.append((order, id.step, id.attempt, world, created, ranks))
    return rows, notes, damaged


def _by_id(stored: Iterable[Stored]) -> dict[CheckpointId, list[int]]:
    found: dict[CheckpointId, list[int]] = {}
    for shard in stored:
        found.setdefault(shard.id, []).append(shard.rank)
    return found


def _world_of(tier: Tier, id: CheckpointId, ranks: Sequence[int]) -> tuple[int, float]:
    """From the first record that can be read: one damaged shard must not hide the others."""
    for rank in ranks[:-1]:
        try:
            return _read_world(tier, id, rank)
        except CheckpointError as error:
            log.warning("%s: %s", tier.name, error)
    return _read_world(tier, id, ranks[-1])


def _read_world(tier: Tier, id: CheckpointId, rank: int) -> tuple[int, float]:
    with closing(tier.open(Stored(id, rank))) as shard:
        return shard.record.world, shard.record.created
