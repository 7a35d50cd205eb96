"""Reading one checkpoint on all ranks, from wherever its shards are.

A shard that every rank can reach is read by each of them; any other by one rank, which sends it to
the rest. Whatever a rank finds on the way, it takes part in every broadcast: it notes the problem,
and all ranks compare notes at two points, when the records are read and when the bytes are. Only
there do they decide, together, to read again from other places or to give the checkpoint up.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.buffers.fresh import fresh_memory
from sapwood.checkpoint.inventory import Candidate, Place, told
from sapwood.errors import CheckpointError, PeerFailed, SapwoodError
from sapwood.runtime.group import Group
from sapwood.state.catalog import Catalog
from sapwood.tiers.base import Stored, StoredShard, Tier, open_checked, read_range
from sapwood.tiers.record import EXTRAS, Range, ShardRecord, differing

__all__ = ["Accept", "ReadState", "Reading"]

log = logging.getLogger(__name__)
Key = tuple[str, str]
Bytes = npt.NDArray[np.uint8]
Accept = Callable[[Catalog, Mapping[str, Any]], None]
"""Raises unless a run can take a state with these tensors and extras of the lowest rank."""


@dataclass(frozen=True, kw_only=True)
class ReadState:
    """A checkpoint in this rank's memory, every byte verified."""

    records: Mapping[int, ShardRecord]
    tensors: Mapping[Key, Bytes]
    regions: Mapping[int, Bytes]
    """What the extras of rank 0, and of this rank, refer to."""
    tiers: tuple[str, ...]
    """Where the shards came from."""


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The memory a checkpoint is read into."""

    tensors: Mapping[Key, Bytes]
    regions: Mapping[int, Bytes]

    def of(self, shard: int, part: Range, *, sent: bool) -> Bytes | None:
        """Where a part of a shard goes; None if it need not be read here.

        What another rank keeps beside its tensors is only passed by, where it is sent to all.
        """
        if part.piece.file == EXTRAS and shard not in self.regions:
            return fresh_memory(part.nbytes) if sent else None
        extras = part.piece.file == EXTRAS
        target = self.regions[shard] if extras else self.tensors.get(part.piece.key)
        if target is None:
            return None
        begin = part.piece.start + part.start
        return target[begin : begin + part.nbytes]


class Reading:
    """Reads one candidate, from other places each time something turns out to be damaged."""

    def __init__(
        self,
        group: Group,
        tiers: Sequence[Tier],
        candidate: Candidate,
        *,
        files: Collection[str],
        accept: Accept,
        skipped: list[str],
    ) -> None:
        """``files``: only these; all if empty. What is passed over is added to ``skipped``."""
        self._group, self._tiers, self._candidate = group, tiers, candidate
        self._files, self._accept, self._skipped = files, accept, skipped
        self._open: dict[int, StoredShard] = {}
        self._problems: list[tuple[int | None, list[int] | None, str]] = []
        self._one_source = False

    def load(self) -> ReadState | None:
        """Read it; None, on every rank, if it is not whole after all.

        Raises:
            CheckpointError: it is whole, but the run of some rank cannot take it.
        """
        while not self._candidate.missing:
            try:
                found = self._read()
            finally:
                for shard in self._open.values():
                    shard.close()
                self._open.clear()
            if found is not None:
                return found
        return None

    def _read(self) -> ReadState | None:
        """Go through all shards once; None, on every rank, if some rank had a problem."""
        records = self._read_records()
        self._compare(records)
        room, refusal = self._try_to_make_room(records)
        if not self._agreed(_fingerprint(records), refusal):
            return None
        assert room is not None  # else some rank had a problem
        self._read_bytes(records, room)
        if not self._agreed():
            return None
        places = (self._source(shard) for shard in records)
        used = dict.fromkeys(self._tiers[place.order].name for place in places)
        return ReadState(
            records=records, tensors=room.tensors, regions=room.regions, tiers=tuple(used)
        )

    # -- records -----------------------------------------------------------------------------

    def _read_records(self) -> dict[int, ShardRecord]:
        """Every record that could be read, in the order of the shards."""
        records: dict[int, ShardRecord] = {}
        for shard in range(self._candidate.world):
            sender, content = self._sender(shard), b""
            if sender in (None, self._group.rank):
                try:
                    records[shard] = self._opened(shard).record
                    content = b"" if sender is None else records[shard].encode()
                except Exception as error:
                    self._note(shard, error)
            if sender is None:
                continue
            content = self._send(content, sender)
            # Nothing was sent if the sender could not read it: it has noted why.
            if content and sender != self._group.rank:
                try:
                    what = f"shard {shard} of {self._candidate.id}"
                    records[shard] = ShardRecord.decode(content, what)
                except Exception as error:
                    self._note(shard, error)
        return records

    def _compare(self, records: Mapping[int, ShardRecord]) -> None:
        """See that the records are of one checkpoint and leave no byte out."""
        if len(records) < self._candidate.world:
            return
        kinds = Counter(record.identity for record in records.values())
        usual = kinds.most_common(1)[0][0]
        strange = [shard for shard, record in records.items() if record.identity != usual]
        for shard in strange:
            other = differing(records[shard].identity, usual)
            self._note(
                shard,
                CheckpointError(
                    f"shard {shard} does not belong to the others, it has another {other}: files "
                    "were moved, or come from another training"
                ),
            )
        if not strange:
            for gap in _gaps(records):
                self._note(None, CheckpointError(gap))

    def _try_to_make_room(
        self, records: Mapping[int, ShardRecord]
    ) -> tuple[_Room | None, Exception | None]:
        """Memory for the state, or why this rank's run cannot take it."""
        if self._problems:
            return None, None  # these records are not what will be restored
        try:
            return self._make_room(records), None
        except PeerFailed:
            raise  # every rank hears of that by itself
        except Exception as error:
            return None, error

    def _make_room(self, records: Mapping[int, ShardRecord]) -> _Room:
        """See that this rank's run can take the state, and get the memory it needs."""
        first = records[0]
        self._accept(first.catalog, first.extras)
        wanted = [e for e in first.catalog.entries if not self._files or e.file in self._files]
        return _Room(
            tensors={entry.key: fresh_memory(entry.nbytes) for entry in wanted},
            regions={
                shard: fresh_memory(records[shard].extras_bytes)
                for shard in {0, self._group.rank} & records.keys()
            },
        )

    # -- bytes -------------------------------------------------------------------------------

    def _read_bytes(self, records: Mapping[int, ShardRecord], room: _Room) -> None:
        for shard, record in records.items():
            sender, failed = self._sender(shard), False
            for part in record.ranges:
                view = room.of(shard, part, sent=sender is not None)
                if view is None:
                    continue
                if sender in (None, self._group.rank) and not failed:
                    try:
                        read_range(self._opened(shard), part, view)
                    except Exception as error:
                        self._note(shard, error)
                        failed = True
                if sender is not None:
                    # Worthless bytes of a damaged shard are sent too: the others wait for them.
                    self._broadcast(view, sender)

    # -- agreeing ----------------------------------------------------------------------------

    def _note(self, shard: int | None, error: Exception) -> None:
        """Remember what is wrong with a shard where it was read; None: with the checkpoint."""
        if not isinstance(error, SapwoodError):
            log.error("checkpoint %s, unforeseen:", self._candidate.id, exc_info=error)
        place = None if shard is None else self._source(shard)
        where = None if place is None else [place.order, place.reader]
        self._problems.append((shard, where, told(error)))

    def _agreed(self, mark: str = "", refusal: Exception | None = None) -> bool:
        """Whether no rank has a problem, and all have the same ``mark``.

        If some rank has one, all of them forget the places it was at.

        Raises:
            CheckpointError: no rank has, but some run cannot take this state, for its ``refusal``.
        """
        mine, self._problems = self._problems, []
        refused = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        texts = self._group.gather_text("result of reading", json.dumps([mine, mark, refused]))
        found = [json.loads(text) for text in texts]
        problems = [problem for theirs, _, _ in found for problem in theirs]
        for shard, where, message in problems:
            self._skip(f"{self._candidate.id}: {message}")
            self._forget(shard, where)
        if problems:
            return False
        if all(mark == other for _, other, _ in found):
            if refusal is not None:
                raise refusal
            for rank, (_, _, why) in enumerate(found):
                if why:
                    id = self._candidate.id
                    raise CheckpointError(f"rank {rank} cannot restore checkpoint {id}: {why}")
            return True
        # Each rank read what it can reach itself, and these copies are not of one save.
        self._skip(f"{self._candidate.id}: ranks have different copies of it; all take the same")
        self._one_source = True
        return False

    def _skip(self, note: str) -> None:
        if note not in self._skipped:
            self._skipped.append(note)

    def _forget(self, shard: int | None, where: list[int] | None) -> None:
        if shard is None:
            self._candidate.places.clear()
            return
        places = self._candidate.places.get(shard, [])
        self._candidate.places[shard] = [p for p in places if [p.order, p.reader] != where]

    # -- places ------------------------------------------------------------------------------

    def _sender(self, shard: int) -> int | None:
        """The rank that reads a shard for the others; None if every rank reads it itself."""
        places = self._candidate.places[shard]
        everybody = {p.reader for p in places} >= set(range(self._group.world))
        return None if everybody and not self._one_source else places[0].reader

    def _source(self, shard: int) -> Place:
        """Where this rank's bytes of a shard come from: read by itself, or by the sender."""
        places, mine = self._candidate.places[shard], self._group.rank
        if self._sender(shard) is not None:
            return places[0]
        return next(place for place in places if place.reader == mine)

    def _opened(self, shard: int) -> StoredShard:
        if shard not in self._open:
            tier = self._tiers[self._source(shard).order]
            self._open[shard] = open_checked(tier, Stored(self._candidate.id, shard))
        return self._open[shard]

    # -- sending -----------------------------------------------------------------------------

    def _send(self, content: bytes, sender: int) -> bytes:
        size = np.array([len(content)], np.int64)
        self._broadcast(size.view(np.uint8), sender)
        memory = np.frombuffer(content, np.uint8).copy() if content else np.empty(size[0], np.uint8)
        if size[0]:
            self._broadcast(memory, sender)
        return memory.tobytes()

    def _broadcast(self, memory: Bytes, sender: int) -> None:
        here = torch.from_numpy(memory)
        there = here.to(self._group.device)  # the same tensor, where the group is on CPUs
        self._group.broadcast(there, "sending a shard", source=sender).wait()
        if there is not here and sender != self._group.rank:
            here.copy_(there)


def _fingerprint(records: Mapping[int, ShardRecord]) -> str:
    """The same on two ranks only if their records describe the same bytes."""
    found = hashlib.blake2b(digest_size=16)
    for shard, record in records.items():
        facts = record.identity, record.created, record.digests, record.extras_digests
        found.update(repr((shard, *facts)).encode())
    return found.hexdigest()


def _gaps(records: Mapping[int, ShardRecord]) -> list[str]:
    held: Counter[Key] = Counter()
    for record in records.values():
        for piece in record.shard.pieces:
            held[piece.key] += piece.nbytes
    return [
        f"its shards hold {held[entry.key]} bytes of {entry.file} {entry.name}, which has "
        f"{entry.nbytes}"
        for entry in records[0].catalog.entries
        if held[entry.key] != entry.nbytes
    ]
