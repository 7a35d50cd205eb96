"""Bringing back the newest state that is whole, on any number of ranks.

Nothing of the run is touched before every rank has read and verified all it needs: a damaged range
on one rank makes all of them try another copy, another tier, or an older checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.buffers.fresh import fresh_memory
from sapwood.checkpoint.inventory import Candidate, Inventory, Place, take_inventory
from sapwood.errors import CheckpointError, TierError
from sapwood.runtime.group import Group
from sapwood.state.apply import GivenState
from sapwood.state.packed import unpack
from sapwood.tiers.base import Stored, StoredShard, Tier, read_range
from sapwood.tiers.record import EXTRAS, CheckpointId, Range, ShardRecord
from sapwood.tiers.spec import SHARED

__all__ = ["Loaded", "Restored", "load_newest"]

log = logging.getLogger(__name__)
Key = tuple[str, str]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run was brought back to."""

    id: CheckpointId
    """The checkpoint that was read."""
    world: int
    """The number of ranks that saved it."""
    tiers: tuple[str, ...]
    """Where the shards came from."""
    skipped: tuple[str, ...]
    """What was passed over on the way here, and why."""

    @property
    def step(self) -> int:
        """The steps that had ended; the next one is ``step + 1``, as ``run.step_count`` says."""
        return self.id.step


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in the memory of this rank, verified."""

    about: Restored
    state: GivenState


def load_newest(
    group: Group, tiers: Sequence[Tier], *, step: int | None = None, files: Collection[str] = ()
) -> Loaded | None:
    """Read the newest whole checkpoint (of ``step``, if given); None if there is none at all.

    Args:
        group: all ranks take part.
        tiers: cheapest first, the same kinds in the same order on every rank.
        step: only this one.
        files: only these, such as ``("model",)``; all if empty.

    Raises:
        CheckpointError: there are checkpoints, but none is whole; the message says why.
    """
    inventory = take_inventory(group, tiers)
    skipped = list(inventory.notes)
    for candidate in inventory.find(step):
        if candidate.missing:
            skipped.append(f"{candidate.id}: no tier has the shards of ranks {candidate.missing}")
            continue
        loaded = _Attempt(group, tiers, candidate, files, skipped).load()
        if loaded is not None:
            return loaded
    _complain(inventory, tiers, step, skipped)
    return None


def _complain(
    inventory: Inventory, tiers: Sequence[Tier], step: int | None, skipped: list[str]
) -> None:
    # To begin anew where something was is the user's decision, not ours; where a first save was
    # interrupted, nothing was.
    lost = [c for c in inventory.find(step) if not _never_whole(c, tiers)]
    if lost or inventory.damaged or (step is not None and inventory.candidates):
        what = "no checkpoint is whole" if step is None else f"step {step} cannot be restored"
        known = sorted({c.id.step for c in inventory.candidates} | set(inventory.damaged))
        raise CheckpointError(f"{what} (steps found: {known}): " + "; ".join(skipped or ["none"]))
    for note in skipped:
        log.warning("while looking for checkpoints: %s", note)


def _never_whole(candidate: Candidate, tiers: Sequence[Tier]) -> bool:
    """Whether it lacks shards that would be seen, had they ever been safe anywhere."""
    return bool(candidate.missing) and {tier.name for tier in tiers} <= {"memory", *SHARED}


@dataclass
class _Attempt:
    """Reading one candidate, from other places each time something turns out to be damaged."""

    group: Group
    tiers: Sequence[Tier]
    candidate: Candidate
    files: Collection[str]
    skipped: list[str]
    _open: dict[int, StoredShard] = field(default_factory=dict)

    def load(self) -> Loaded | None:
        while not self.candidate.missing:
            try:
                loaded, problem = self._read(), None
            except (CheckpointError, TierError) as error:
                loaded, problem = None, error
            finally:
                for shard in self._open.values():
                    shard.close()
                self._open.clear()
            if not self._agree(problem):
                return loaded
        return None

    def _agree(self, problem: Exception | None) -> bool:
        """Whether some rank had a problem; if so, forget the places it was at, on every rank."""
        mine = None if problem is None else self._told(problem)
        bad = False
        for text in self.group.gather_text("result of reading", json.dumps(mine)):
            found = json.loads(text)
            if found is None:
                continue
            bad = True
            shard, where, message = found
            note = f"{self.candidate.id}: {message}"
            if note not in self.skipped:
                self.skipped.append(note)
            self._forget(shard, where)
        return bad

    def _told(self, problem: Exception) -> list[Any]:
        """What the others must know: the shard, where it was read, and what was wrong."""
        shard = problem.shard if isinstance(problem, _ShardError) else None
        place = None if shard is None else self._place(shard)
        where = None if place is None else [place.order, place.reader]
        return [shard, where, str(problem)]

    def _forget(self, shard: int | None, where: list[int] | None) -> None:
        if shard is None or where is None:
            self.candidate.places.clear()  # a problem of the checkpoint as a whole
            return
        places = self.candidate.places.get(shard, [])
        self.candidate.places[shard] = [p for p in places if [p.order, p.reader] != where]

    # -- reading -----------------------------------------------------------------------------

    def _place(self, shard: int) -> Place | None:
        """Where this rank reads a shard: where it can itself, else at the rank that sends it."""
        places = self.candidate.places.get(shard, [])
        mine = (p for p in places if p.reader == self.group.rank)
        return next(mine, places[0] if places else None)

    def _sender(self, shard: int) -> int | None:
        """The rank that reads a shard for the others; None if every rank can read it itself."""
        places = self.candidate.places[shard]
        if {p.reader for p in places} >= set(range(self.group.world)):
            return None
        return places[0].reader

    def _read(self) -> Loaded:
        tensors: dict[Key, Bytes] = {}
        records: dict[int, ShardRecord] = {}
        regions: dict[int, Bytes] = {}
        used: dict[str, None] = {}
        for shard in range(self.candidate.world):
            record = records[shard] = self._record(shard)
            if (record.catalog, record.world) != (records[0].catalog, records[0].world):
                raise CheckpointError(f"shards 0 and {shard} do not belong together")
            self._fill(shard, record, tensors, regions)
            place = self._place(shard)
            assert place is not None
            used[self.tiers[place.order].name] = None
        mine = records.get(self.group.rank)
        about = Restored(
            id=self.candidate.id,
            world=self.candidate.world,
            tiers=tuple(used),
            skipped=tuple(self.skipped),
        )
        state = GivenState(
            catalog=records[0].catalog,
            tensors=tensors,
            common=unpack(records[0].extras, regions.get(0, b"")),
            mine={} if mine is None else unpack(mine.extras, regions.get(mine.rank, b"")),
        )
        return Loaded(about=about, state=state)

    def _opened(self, shard: int) -> StoredShard:
        if shard not in self._open:
            place = self._place(shard)
            assert place is not None
            try:
                tier = self.tiers[place.order]
                self._open[shard] = tier.open(Stored(self.candidate.id, shard))
            except (CheckpointError, TierError) as error:
                raise _of(shard, error) from error
        return self._open[shard]

    def _record(self, shard: int) -> ShardRecord:
        sender = self._sender(shard)
        if sender is None:
            return self._opened(shard).record
        content = b""
        try:
            if sender == self.group.rank:
                content = self._opened(shard).record.encode()
        finally:
            # Also when it cannot be read: nothing, rather than silence, for the others.
            content = self._send_bytes(content, sender)
        if not content:
            raise _of(shard, CheckpointError(f"rank {sender} could not read shard {shard}"))
        return ShardRecord.decode(content, f"shard {shard} of {self.candidate.id}")

    def _fill(
        self,
        shard: int,
        record: ShardRecord,
        tensors: dict[Key, Bytes],
        regions: dict[int, Bytes],
    ) -> None:
        sender = self._sender(shard)
        problem: CheckpointError | None = None
        for part in record.ranges:
            if part.piece.file == EXTRAS:
                found = self._region_part(record, part, regions, sent=sender is not None)
                if found is None:
                    continue
                view = found
            elif self.files and part.piece.file not in self.files:
                continue
            else:
                view = _tensor_part(record, part, tensors)
            if sender in (None, self.group.rank) and problem is None:
                try:
                    read_range(self._opened(shard), part, view)
                except CheckpointError as error:
                    problem = _of(shard, error)
                    if sender is None:
                        raise problem from error
            if sender is not None:
                # A sender with a damaged shard goes on sending, or the others would wait for it.
                self._broadcast(view, sender)
        if problem is not None:
            raise problem

    def _region_part(
        self, record: ShardRecord, part: Range, regions: dict[int, Bytes], *, sent: bool
    ) -> Bytes | None:
        """Where to read a part of what extras refer to; None if it need not be read here.

        Rank 0's is everybody's; another rank's own is only passed by, where it is sent to all.
        """
        if record.rank not in (0, self.group.rank):
            return fresh_memory(part.nbytes) if sent else None
        if record.rank not in regions:
            regions[record.rank] = fresh_memory(record.extras_bytes)
        return regions[record.rank][part.start : part.start + part.nbytes]

    def _send_bytes(self, content: bytes, sender: int) -> bytes:
        size = np.array([len(content)], np.int64)
        self._broadcast(size.view(np.uint8), sender)
        memory = np.frombuffer(content, np.uint8).copy() if content else np.empty(size[0], np.uint8)
        if size[0]:
            self._broadcast(memory, sender)
        return memory.tobytes()

    def _broadcast(self, memory: Bytes, sender: int) -> None:
        here = torch.from_numpy(memory)
        there = here.to(self.group.device)  # the same tensor, where the group is on CPUs
        self.group.broadcast(there, "sending a shard", source=sender).wait()
        if there is not here and sender != self.group.rank:
            here.copy_(there)


def _tensor_part(record: ShardRecord, part: Range, tensors: dict[Key, Bytes]) -> Bytes:
    target = tensors.get(part.piece.key)
    if target is None:
        nbytes = record.catalog.by_key[part.piece.key].nbytes
        target = tensors[part.piece.key] = fresh_memory(nbytes)
    begin = part.piece.start + part.start
    return target[begin : begin + part.nbytes]


class _ShardError(CheckpointError):
    """A problem with one shard in one place."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


def _of(shard: int, error: Exception) -> _ShardError:
    return _ShardError(shard, str(error))
