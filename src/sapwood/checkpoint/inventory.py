"""What is where: the shards every rank can reach, and which checkpoint they make whole."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from sapwood.checkpoint.branches import Branches, Seen
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.runtime.group import Group
from sapwood.tiers.base import Misplaced, Recorded, Stored, Tier, open_checked
from sapwood.tiers.record import CheckpointId, Lineage, ShardRecord

__all__ = ["Candidate", "Inventory", "Place", "look_around", "take_inventory", "told"]

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
    lineage: Lineage | None = None
    places: dict[int, list[Place]] = field(default_factory=dict)
    """By shard, cheapest first."""

    @property
    def missing(self) -> list[int]:
        """Shards that are nowhere."""
        return [rank for rank in range(self.world) if not self.places.get(rank)]


@dataclass(frozen=True)
class Inventory:
    """All checkpoints the ranks can see together; the same on every rank."""

    candidates: tuple[Candidate, ...]
    """Newest first; of two attempts at a step, the later one."""
    branches: Branches
    notes: tuple[str, ...]
    """What could not be looked at, and why."""
    damaged: tuple[CheckpointId, ...] = ()
    """Checkpoints of which some tier has no readable record."""
    unknown: tuple[CheckpointId, ...] = ()
    """Those of them of whose attempt nothing at all can be read: it may be the current one."""

    @property
    def steps(self) -> list[int]:
        """Every step of which something is there."""
        return sorted({c.id.step for c in self.candidates} | {id.step for id in self.damaged})


def take_inventory(group: Group, tiers: Sequence[Tier]) -> Inventory:
    """Look into all tiers, on all ranks, and put together what each of them found."""
    texts = group.gather_text("checkpoints", json.dumps(_look(tiers)))
    found: dict[CheckpointId, Candidate] = {}
    notes: dict[str, None] = {}
    damaged: dict[CheckpointId, bool] = {}
    seen: list[Seen] = []
    for reader, text in enumerate(texts):
        theirs = json.loads(text)
        notes.update(dict.fromkeys(theirs["notes"]))
        known = {name: _lineage(value) for name, value in theirs["lineages"].items()}
        for step, attempt, created, moved in theirs["damaged"]:
            id = CheckpointId(step, attempt)
            damaged[id] = moved or damaged.get(id, False)
            if created is not None:
                seen.append(Seen(id, created, known[attempt]))
        for order, step, attempt, world, created, shards in theirs["rows"]:
            id = CheckpointId(step, attempt)
            candidate = found.setdefault(id, Candidate(id, world, created, known[attempt]))
            for rank in shards:
                candidate.places.setdefault(rank, []).append(Place(order, reader))
    for candidate in found.values():
        seen.append(Seen(candidate.id, candidate.created, candidate.lineage))
        for places in candidate.places.values():
            places.sort(key=lambda p: (p.order, p.reader))
    branches = Branches(seen)
    unread = (id for id, moved in damaged.items() if not moved)
    return Inventory(
        candidates=tuple(
            sorted(found.values(), key=lambda c: (c.id.step, c.created), reverse=True)
        ),
        branches=branches,
        notes=tuple(notes),
        damaged=tuple(sorted(damaged)),
        unknown=tuple(sorted(id for id in unread if id.attempt not in branches.attempts)),
    )


def look_around(tiers: Sequence[Tier], timeout: float) -> Branches:
    """The attempts this rank sees, by one checkpoint of each; closes the tiers.

    A place that does not answer in ``timeout`` seconds, or at all, must not hold up whoever starts
    a training: what is not seen is left out.
    """
    seen: list[Seen] = []

    def look() -> None:
        for tier in tiers:
            try:
                seen.extend(_attempts_in(tier))
            except Exception as error:
                log.info("tier %s: earlier attempts are not known: %s", tier.name, error)
            finally:
                tier.close()

    # A thread of its own: a file system that hangs cannot be interrupted, only left behind.
    thread = threading.Thread(target=look, name="sapwood-look-around", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        log.warning("the checkpoints there are were not listed in %g s", timeout)
    return Branches(list(seen))


def _attempts_in(tier: Tier) -> Iterable[Seen]:
    newest: dict[str, list[Stored]] = {}
    for stored in tier.shards():
        newest.setdefault(stored.id.attempt, []).append(stored)
    for shards in newest.values():
        for stored in reversed(shards):  # the newest first; it may be damaged
            try:
                with closing(open_checked(tier, stored)) as shard:
                    yield Seen(stored.id, shard.record.created, shard.record.lineage)
                break
            except SapwoodError:
                continue


@dataclass
class _Found:
    """What one rank sees, as plain values."""

    rows: list[tuple[int, int, str, int, float, list[int]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged: list[tuple[int, str, float | None, bool]] = field(default_factory=list)
    """Step and attempt, when it was created if its record can be read, whether it was moved."""
    lineages: dict[str, Any] = field(default_factory=dict)

    def learn(self, record: ShardRecord) -> None:
        """Remember where the attempt of a record came from."""
        lineage = None if record.lineage is None else record.lineage.to_json()
        name = record.id.attempt
        self.lineages[name] = self.lineages.get(name) or lineage


def _look(tiers: Sequence[Tier]) -> dict[str, Any]:
    """What is in the tiers, what cannot be read and why.

    Whatever is wrong with a tier is a note: a rank that raised here would leave the others waiting.
    """
    found = _Found()
    for order, tier in enumerate(tiers):
        try:
            stored = tier.shards()
        except Exception as error:
            found.notes.append(f"{tier.name}: {told(error)}")
            continue
        for id, ranks in _by_id(stored).items():
            try:
                record = _first_record(tier, id, ranks)
            except Exception as error:
                found.notes.append(f"{tier.name}, checkpoint {id}: {told(error)}")
                _look_at_damage(found, tier, id, ranks, moved=isinstance(error, Misplaced))
                continue
            found.learn(record)
            row = (order, id.step, id.attempt, record.world, record.created, ranks)
            found.rows.append(row)
    return asdict(found)


def _look_at_damage(
    found: _Found, tier: Tier, id: CheckpointId, ranks: Sequence[int], *, moved: bool
) -> None:
    """A checkpoint that cannot be read still says of which branch it is, if a record is left."""
    record = _record_alone(tier, id, ranks) if isinstance(tier, Recorded) else None
    if record is not None:
        found.learn(record)
    created = None if record is None else record.created
    found.damaged.append((id.step, id.attempt, created, moved))


def _record_alone(tier: Recorded, id: CheckpointId, ranks: Sequence[int]) -> ShardRecord | None:
    """The first record that can be read where no shard can."""
    for rank in ranks:
        try:
            record = tier.record(Stored(id, rank))
        except Exception as error:
            log.debug("checkpoint %s, shard %d: %s", id, rank, error)
            continue
        if record.id == id:
            return record
    return None


def _by_id(stored: Iterable[Stored]) -> dict[CheckpointId, list[int]]:
    found: dict[CheckpointId, list[int]] = {}
    for shard in stored:
        found.setdefault(shard.id, []).append(shard.rank)
    return found


def _first_record(tier: Tier, id: CheckpointId, ranks: Sequence[int]) -> ShardRecord:
    """The first record that can be read: one damaged shard must not hide the others."""
    for rank in ranks[:-1]:
        try:
            return _record(tier, Stored(id, rank))
        except CheckpointError as error:
            log.warning("%s: %s", tier.name, error)
    return _record(tier, Stored(id, ranks[-1]))


def _record(tier: Tier, stored: Stored) -> ShardRecord:
    with closing(open_checked(tier, stored)) as shard:
        return shard.record


def _lineage(value: Any) -> Lineage | None:
    return None if value is None else Lineage.from_json(value)


def told(error: Exception) -> str:
    """An error in words; what nobody foresaw with its kind."""
    return str(error) if isinstance(error, SapwoodError) else f"{type(error).__name__}: {error}"
